#include "bindings/plain_data.h"

#include <string>
#include <utility>

#include "exec/program/program.h"

namespace py = pybind11;

namespace elaswave {
namespace {

exec::Data::List list_of(const py::handle& object) {
  exec::Data::List list;
  list.reserve(py::len(object));
  for (const py::handle item : object) list.push_back(plain_data(item));
  return list;
}

exec::Data::Map map_of(const py::dict& object) {
  exec::Data::Map map;
  map.reserve(object.size());
  for (const auto& [key, value] : object) map.push_back({py::cast<std::string>(key), plain_data(value)});
  return map;
}

exec::Data::Map fields_of(const py::handle& object, const py::dict& fields) {
  exec::Data::Map map;
  map.reserve(fields.size());
  for (const auto& [name, field] : fields) map.push_back({py::cast<std::string>(name), plain_data(object.attr(name))});
  return map;
}

}  // namespace

exec::Data plain_data(const py::handle& object) {
  if (object.is_none()) return {};
  if (py::isinstance<py::bool_>(object)) return {py::cast<bool>(object)};
  if (py::isinstance<py::int_>(object)) return {py::cast<std::int64_t>(object)};
  if (py::isinstance<py::float_>(object)) return {py::cast<double>(object)};
  if (py::isinstance<py::str>(object)) return {py::cast<std::string>(object)};
  if (py::isinstance<py::list>(object) || py::isinstance<py::tuple>(object)) return {list_of(object)};
  if (py::isinstance<py::dict>(object)) return {map_of(py::reinterpret_borrow<py::dict>(object))};
  if (py::hasattr(object, "__dataclass_fields__")) return {fields_of(object, object.attr("__dataclass_fields__"))};
  throw exec::ExecError("plain data: there is no form for a " + std::string(py::str(py::type::of(object))));
}

}  // namespace elaswave
