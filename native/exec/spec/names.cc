#include "exec/spec/names.h"

#include <c10/util/Exception.h>

#include <map>
#include <string_view>

namespace elaswave::exec {
namespace {

template <typename T>
T find(const std::map<std::string_view, T>& table, const std::string& name, const char* what) {
  const auto found = table.find(name);
  if (found == table.end()) throw UnknownName(std::string("unknown ") + what + " \"" + name + "\"");
  return found->second;
}

}  // namespace

c10::ScalarType dtype_from(const std::string& name) {
  using enum c10::ScalarType;
  static const std::map<std::string_view, c10::ScalarType> table = {
      {"float32", Float},
      {"float64", Double},
      {"float16", Half},
      {"bfloat16", BFloat16},
      {"int64", Long},
      {"int32", Int},
      {"int16", Short},
      {"int8", Char},
      {"uint8", Byte},
      {"bool", Bool},
      {"complex64", ComplexFloat},
      {"complex128", ComplexDouble},
  };
  return find(table, name, "dtype");
}

c10::Device device_from(const std::string& name) {
  try {
    return c10::Device(name);
  } catch (const c10::Error&) {
    throw UnknownName("unknown device \"" + name + "\"");
  }
}

c10::Layout layout_from(const std::string& name) {
  static const std::map<std::string_view, c10::Layout> table = {{"strided", c10::Layout::Strided}};
  return find(table, name, "layout");
}

c10::MemoryFormat memory_format_from(const std::string& name) {
  using enum c10::MemoryFormat;
  static const std::map<std::string_view, c10::MemoryFormat> table = {
      {"contiguous_format", Contiguous},
      {"preserve_format", Preserve},
      {"channels_last", ChannelsLast},
      {"channels_last_3d", ChannelsLast3d},
  };
  return find(table, name, "memory format");
}

}  // namespace elaswave::exec
