// A unit program from plain data as passes/unit_program.py writes it. No torch in here.
#pragma once

#include "exec/program/program.h"
#include "exec/spec/data.h"

namespace elaswave::exec {

// Throws ExecError that names the place. Slots and operators are checked later: by verify_slots, and when it is linked.
ProgramSpec read_program(const Reader& data);

}  // namespace elaswave::exec
