// The one value that an engine is made of: read from what elaswave_fx/plan/lower/engine_spec.py writes, and checked.
// All checks of declarations are here, but for the order of instructions, which is schedule.h's. Private to exec/.
//
// The encoding is plain data (data.h): the fields of the Python dataclasses by their names.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "exec/program/program.h"
#include "exec/spec/data.h"
#include "exec/spec/declarations.h"

namespace elaswave::exec {

struct EngineSpec {
  RankId rank;
  KeyStream keys;
  std::int64_t global_batch = 1, granule = 1;  // samples; the latter: of a micro-batch where buffers are updated
  bool exact = false;                          // gradients are summed without regard to order, and without loss
  c10::ScalarType record_dtype = c10::ScalarType::Float;
  CopyMode copy_mode = CopyMode::kLog;
  std::vector<RankId> world;                 // all ranks of the vote, ascending, this one included
  std::map<RankId, std::size_t> vote_spans;  // how many rectangles of the work plane each of them computes
  std::vector<ValueSpec> values;
  std::vector<BucketSpec> buckets;
  std::vector<BoxSpec> boxes;  // every rank has the same list, so that a box has one number
  std::vector<BufferUpdateSpec> updates;
  Units units;
  Schedule schedule;
};

// What the names in a spec stand for.
struct Names {
  std::function<std::optional<ProgramId>(const std::string&)> program;
  std::function<const ProgramSpec&(ProgramId)> program_spec;
  std::function<std::optional<TableId>(const std::string&)> table;
};

// Throws ExecError that names the place, the fact and the rule.
EngineSpec read_spec(const Data& data, const Names& names);

// Whether an engine of `before` can go on as `after`. What is computed stays, and so do the cuts of boxes; who does
// what may change. Throws ExecError.
void check_successor(const EngineSpec& before, const EngineSpec& after);

}  // namespace elaswave::exec
