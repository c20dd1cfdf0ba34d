// What an engine goes over to: the spec of another plan, with the memory of buckets that the rank comes to read. One
// handle from its making to its installation:
//
//   NextSpec next(data, {BucketId(3)})    while steps run: memory of fresh pages takes its time
//   engine.prepare(next, tables)          between two steps: reads and checks it; nothing that computes changes
//   engine.install(next, {})              between two steps: takes it over, once
//
// Threads: any thread makes it; from then on it is the engine's thread's. One that `prepare` refuses is as it was; one
// that `install` took is spent, also if taking it over failed.
#pragma once

#include <utility>
#include <variant>
#include <vector>

#include "exec/spec/data.h"
#include "exec/spec/spec.h"
#include "exec/state/buckets.h"

namespace elaswave::exec {

class NextSpec {
 public:
  // `ahead`: buckets whose memory is made now. Throws ExecError for one that the spec does not have.
  explicit NextSpec(Data data, const std::vector<BucketId>& ahead = {});

 private:
  friend class Engine;

  struct Taken {};
  // None once it was read.
  const Data* unread() const { return std::get_if<Data>(&spec_); }
  void set_read(EngineSpec spec) { spec_ = std::move(spec); }
  // What was read, and the memory made for it. Throws ExecError the second time.
  std::pair<EngineSpec, BucketMemories> take();

  std::variant<Data, EngineSpec, Taken> spec_;
  BucketMemories memories_;
};

}  // namespace elaswave::exec
