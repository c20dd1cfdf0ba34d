#include "exec/spec/data.h"

#include "exec/program/program.h"

namespace elaswave::exec {
namespace {

// Appends the way from `from` to `to`; false if there is none. Only failures look for it, so nothing is kept for it.
bool find_path(const Data& from, const Data* to, std::string& path) {
  if (&from == to) return true;
  const std::size_t length = path.size();
  if (const auto* list = std::get_if<Data::List>(&from.value)) {
    for (std::size_t i = 0; i < list->size(); ++i) {
      path.append("[").append(std::to_string(i)).append("]");
      if (find_path((*list)[i], to, path)) return true;
      path.resize(length);
    }
  }
  if (const auto* map = std::get_if<Data::Map>(&from.value)) {
    for (const Field& field : *map) {
      path.append(".").append(field.name);
      if (find_path(field.data, to, path)) return true;
      path.resize(length);
    }
  }
  return false;
}

}  // namespace

std::string Reader::place() const {
  std::string path = name_;
  find_path(*root_, node_, path);
  return path;
}

void Reader::fail(const std::string& fact) const { throw ExecError(place() + ": " + fact); }

template <class T>
const T& Reader::expect(const char* kind) const {
  const T* found = std::get_if<T>(&node_->value);
  if (found == nullptr) fail(std::string("is not ") + kind);
  return *found;
}

bool Reader::boolean() const { return expect<bool>("true or false"); }
std::int64_t Reader::integer() const { return expect<std::int64_t>("an integer"); }
const std::string& Reader::text() const { return expect<std::string>("a text"); }
std::size_t Reader::size() const { return expect<Data::List>("a list").size(); }

double Reader::real() const {
  if (const auto* found = std::get_if<std::int64_t>(&node_->value)) return static_cast<double>(*found);
  return expect<double>("a number");
}

Reader Reader::item(std::size_t index) const {
  const auto& list = expect<Data::List>("a list");
  if (index >= list.size()) {
    fail("has " + std::to_string(list.size()) + " items; item " + std::to_string(index) + " is wanted");
  }
  return {root_, &list[index], name_};
}

std::optional<Reader> Reader::find(std::string_view name) const {
  for (const Field& field : expect<Data::Map>("a map of fields")) {
    if (field.name == name) return Reader(root_, &field.data, name_);
  }
  return std::nullopt;
}

Reader Reader::field(std::string_view name) const {
  const std::optional<Reader> found = find(name);
  if (!found) fail("has no field " + std::string(name));
  return *found;
}

std::vector<std::string> Reader::names() const {
  std::vector<std::string> found;
  for (const Field& field : expect<Data::Map>("a map of fields")) found.push_back(field.name);
  return found;
}

}  // namespace elaswave::exec
