// The unit programs of a job by name, each linked when it is first needed. Private to exec/; same thread as the engine.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exec/program/unit_program.h"
#include "ids.h"

namespace elaswave::exec {

class ProgramLibrary {
 public:
  explicit ProgramLibrary(std::vector<ProgramSpec> programs) : specs_(std::move(programs)), linked_(specs_.size()) {
    for (std::size_t i = 0; i < specs_.size(); ++i) ids_[specs_[i].name] = ProgramId::at(i);
  }

  std::optional<ProgramId> find(const std::string& name) const {
    const auto found = ids_.find(name);
    return found == ids_.end() ? std::nullopt : std::optional(found->second);
  }
  const ProgramSpec& spec(ProgramId id) const { return specs_[id.index()]; }
  // Throws ExecError when the program breaks a rule.
  UnitProgram& linked(ProgramId id) {
    std::unique_ptr<UnitProgram>& program = linked_[id.index()];
    if (!program) program = std::make_unique<UnitProgram>(specs_[id.index()]);
    return *program;
  }

 private:
  std::vector<ProgramSpec> specs_;
  std::map<std::string, ProgramId> ids_;
  std::vector<std::unique_ptr<UnitProgram>> linked_;
};

}  // namespace elaswave::exec
