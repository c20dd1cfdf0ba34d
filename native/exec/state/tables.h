// Tensors by name that units read and nothing changes: constants, frozen parameters, buffers of that kind. Their
// numbers stay for the life of the engine. Private to exec/.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ids.h"

namespace elaswave::exec {

using Tensors = std::map<std::string, at::Tensor>;

class Tables {
 public:
  explicit Tables(const Tensors& tensors) { add(tensors); }

  std::optional<TableId> find(const std::string& name) const {
    const auto found = ids_.find(name);
    return found == ids_.end() ? std::nullopt : std::optional(found->second);
  }
  const at::Tensor& at(TableId id) const { return tensors_[id.index()]; }
  // Takes over those that are new.
  void add(const Tensors& tensors) {
    for (const auto& [name, tensor] : tensors) {
      if (ids_.emplace(name, TableId::at(tensors_.size())).second) tensors_.push_back(tensor);
    }
  }

 private:
  std::map<std::string, TableId> ids_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace elaswave::exec
