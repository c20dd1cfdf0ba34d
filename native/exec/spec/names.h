// Names of dtypes, devices, layouts and memory formats as they stand in programs ("float32", "cpu", "strided"). Private
// to exec/ and its bindings.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "exec/program/program.h"

namespace elaswave::exec {

class UnknownName : public ExecError {
 public:
  using ExecError::ExecError;
};

// All throw UnknownName.
c10::ScalarType dtype_from(const std::string& name);
c10::Device device_from(const std::string& name);
c10::Layout layout_from(const std::string& name);
c10::MemoryFormat memory_format_from(const std::string& name);

}  // namespace elaswave::exec
