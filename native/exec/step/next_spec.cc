#include "exec/step/next_spec.h"

#include "exec/program/program.h"
#include "exec/spec/names.h"

namespace elaswave::exec {

NextSpec::NextSpec(Data data, const std::vector<BucketId>& ahead) {
  const Reader spec(data, "spec");
  for (const BucketId id : ahead) {
    const Reader bucket = spec.field("buckets").item(id.index());
    memories_.emplace(id, BucketMemory(bucket.field("numel").integer(), dtype_from(bucket.field("dtype").text()),
                                       spec.field("exact").boolean()));
  }
  spec_ = std::move(data);
}

std::pair<EngineSpec, BucketMemories> NextSpec::take() {
  auto* const read = std::get_if<EngineSpec>(&spec_);
  if (read == nullptr) throw ExecError("install: this spec has been taken over before");
  std::pair<EngineSpec, BucketMemories> taken(std::move(*read), std::move(memories_));
  spec_ = Taken();
  return taken;
}

}  // namespace elaswave::exec
