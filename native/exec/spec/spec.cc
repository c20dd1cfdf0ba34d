#include "exec/spec/spec.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>
#include <utility>

#include "exec/spec/names.h"
#include "exec/spec/schedule.h"
#include "exec/state/parameter_view.h"

namespace elaswave::exec {
namespace {

constexpr auto kIntegers = [](const Reader& item) { return item.integer(); };
constexpr auto kRanks = [](const Reader& item) { return item.id<RankId>(); };

std::string text_of(RankId rank) { return "rank " + std::to_string(rank.value()); }

std::string span_text(std::int64_t lo, std::int64_t hi) {
  return "[" + std::to_string(lo) + ", " + std::to_string(hi) + ")";
}

bool contains(const std::vector<RankId>& ranks, RankId rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

std::size_t count_of(const Reader& reader) {
  const std::int64_t count = reader.integer();
  if (count < 0) reader.fail(std::to_string(count) + " is negative");
  return static_cast<std::size_t>(count);
}

struct Span {
  std::int64_t lo = 0, hi = 0;
};

c10::ScalarType dtype_of(const Reader& reader) { return dtype_from(reader.text()); }

// Part by part in the order of the file: what a part refers to has been read before it.
class SpecReader {
 public:
  SpecReader(const Reader& data, const Names& names) : data_(data), names_(names) {}

  EngineSpec read() {
    spec_.rank = data_.field("rank").id<RankId>();
    spec_.keys = read_keys(data_.field("keys"));
    read_sizes();
    read_replicas();
    read_world();
    spec_.values = data_.field("values").list([](const Reader& each) { return read_value(each); });
    spec_.buckets = data_.field("buckets").list([this](const Reader& each) { return read_bucket(each); });
    read_boxes();
    read_updates();
    read_units();
    read_schedule();
    return std::move(spec_);
  }

 private:
  static KeyStream read_keys(const Reader& data) {
    return {data.field("seed").integer(), data.field("per_step").integer(), data.field("starts").list(kIntegers)};
  }

  void read_sizes() {
    spec_.global_batch = data_.field("global_batch").integer();
    spec_.granule = data_.field("granule").integer();
    spec_.exact = data_.field("exact").boolean();
    if (spec_.granule < 1 || spec_.global_batch < 1) {
      throw ExecError("engine: global batch and granule must be at least 1");
    }
  }

  void read_replicas() {
    const Reader dtype = data_.field("record_dtype");
    spec_.record_dtype = dtype_of(dtype);
    if (spec_.record_dtype != c10::ScalarType::Float && spec_.record_dtype != c10::ScalarType::BFloat16) {
      dtype.fail("records are float32 or bfloat16, not " + dtype.text());
    }
    const Reader mode = data_.field("copy_mode");
    if (mode.text() != "log" && mode.text() != "state") mode.fail("replicas are synced by \"log\" or \"state\"");
    spec_.copy_mode = mode.text() == "log" ? CopyMode::kLog : CopyMode::kState;
  }

  void read_world() {
    spec_.world = data_.field("world").list(kRanks);
    if (!contains(spec_.world, spec_.rank)) throw ExecError("world: " + text_of(spec_.rank) + " is not in it");
    const Reader spans = data_.field("vote_spans");
    if (spans.size() != spec_.world.size())
      throw ExecError("world: " + std::to_string(spans.size()) + " vote_spans of " +
                      std::to_string(spec_.world.size()) + " ranks");
    for (std::size_t i = 0; i < spans.size(); ++i) spec_.vote_spans[spec_.world[i]] = count_of(spans.item(i));
    std::sort(spec_.world.begin(), spec_.world.end());
  }

  static ValueSpec read_value(const Reader& data) {
    ValueSpec value{data.field("name").text(), data.field("sample_axis").optional(count_of),
                    dtype_of(data.field("dtype")), data.field("shape").list(kIntegers),
                    data.field("has_grad").boolean()};
    if (value.sample_axis && *value.sample_axis >= value.shape.size()) {
      throw ExecError("value " + value.name + ": sample axis " + std::to_string(*value.sample_axis) + " of " +
                      std::to_string(value.shape.size()) + " dimensions");
    }
    return value;
  }

  ProgramId program_named(const std::string& place, const std::string& name) const {
    const std::optional<ProgramId> found = names_.program(name);
    if (!found) throw ExecError(place + ": there is no program " + name);
    return *found;
  }

  TableId table_named(const std::string& place, const std::string& name) const {
    const std::optional<TableId> found = names_.table(name);
    if (!found) throw ExecError(place + ": there is no buffer or constant " + name);
    return *found;
  }

  void check_program(const std::string& place, ProgramId program, std::size_t inputs, std::size_t outputs) const {
    const ProgramSpec& found = names_.program_spec(program);
    if (static_cast<std::size_t>(found.num_inputs) == inputs && found.outputs.size() == outputs) return;
    throw ExecError(place + ": program " + found.name + " has " + std::to_string(found.num_inputs) + " inputs and " +
                    std::to_string(found.outputs.size()) + " outputs, declared are " + std::to_string(inputs) +
                    " and " + std::to_string(outputs));
  }

  BucketSpec read_bucket(const Reader& data) const {
    BucketSpec bucket;
    bucket.name = data.field("name").text();
    const std::string place = "bucket " + bucket.name;
    bucket.numel = data.field("numel").integer();
    bucket.dtype = dtype_of(data.field("dtype"));
    bucket.optimizer =
        data.field("optimizer").optional([&](const Reader& name) { return program_named(place, name.text()); });
    bucket.hyper_group = count_of(data.field("hyper_group"));
    bucket.group = read_group(place, data.field("group"));
    if (!bucket.optimizer && bucket.dtype != c10::ScalarType::Float) {
      throw ExecError(place + ": the bytes of buffers are declared as float32");
    }
    if (names_.table(bucket.name)) throw ExecError(place + ": a buffer or constant has the same name");
    return bucket;
  }

  // Boxes of a bucket follow each other without a gap.
  void read_boxes() {
    std::vector<std::int64_t> covered(spec_.buckets.size());
    const Reader boxes = data_.field("boxes");
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      const Reader data = boxes.item(i);
      const Reader span = data.field("span");
      BoxSpec box{{data.field("bucket").id<BucketId>(), data.field("owner").id<RankId>(),
                   data.field("holders").list(kRanks), data.field("readers").list(kRanks)},
                  span.field("lo").integer(),
                  span.field("hi").integer()};
      const std::string place = "box " + std::to_string(i);
      if (box.bucket().index() >= spec_.buckets.size()) {
        throw ExecError(place + ": there is no bucket " + std::to_string(box.bucket().value()));
      }
      const BucketSpec& bucket = spec_.buckets[box.bucket().index()];
      std::int64_t& end = covered[box.bucket().index()];
      if (box.lo != end || box.hi <= box.lo || box.hi > bucket.numel) {
        throw ExecError("bucket " + bucket.name + ": boxes must cut " + span_text(0, bucket.numel) + " in order; " +
                        span_text(box.lo, box.hi) + " comes after " + std::to_string(end));
      }
      end = box.hi;
      if (contains(box.roles.holders, box.roles.owner)) {
        throw ExecError(place + ": its owner, " + text_of(box.roles.owner) + ", cannot hold it too");
      }
      if (!std::ranges::is_sorted(box.roles.readers)) {
        throw ExecError(place + ": its readers must ascend, sums are formed in their order");
      }
      spec_.boxes.push_back(std::move(box));
    }
    for (std::size_t i = 0; i < covered.size(); ++i) {
      const BucketSpec& bucket = spec_.buckets[i];
      if (covered[i] == bucket.numel) continue;
      throw ExecError("bucket " + bucket.name + ": boxes cover " + std::to_string(covered[i]) + " of " +
                      std::to_string(bucket.numel) + " elements");
    }
  }

  void read_updates() {
    const Reader updates = data_.field("updates");
    for (std::size_t i = 0; i < updates.size(); ++i) {
      const Reader data = updates.item(i);
      const std::string place = "buffer update " + std::to_string(i);
      BufferUpdateSpec update;
      update.program = program_named(place, data.field("program").text());
      update.buffer = read_place(place, data.field("buffer"));
      update.values = data.field("values").list(
          [](const Reader& each) { return GranuleValue{dtype_of(each.item(0)), each.item(1).list(kIntegers)}; });
      check_program(place, update.program, 1 + update.values.size(), 1);
      const BucketSpec& bucket = spec_.buckets[update.buffer.bucket.index()];
      if (bucket.optimizer || !update.buffer.dtype) {
        throw ExecError(place + ": bucket " + bucket.name + " is of parameters, which an optimizer updates");
      }
      spec_.updates.push_back(std::move(update));
    }
    check_buckets_of_buffers();
  }

  // Their updates read a whole state.
  void check_buckets_of_buffers() const {
    for (const BucketId id : all_ids<BucketId>(spec_.buckets.size())) {
      const BucketSpec& bucket = spec_.buckets[id.index()];
      if (bucket.optimizer) continue;
      const auto of_it = [id](const BufferUpdateSpec& update) { return update.buffer.bucket == id; };
      if (std::none_of(spec_.updates.begin(), spec_.updates.end(), of_it)) {
        throw ExecError("bucket " + bucket.name + ": has neither an optimizer nor an update");
      }
      const auto boxes = std::count_if(spec_.boxes.begin(), spec_.boxes.end(),
                                       [id](const BoxSpec& box) { return box.bucket() == id; });
      if (boxes != 1) {
        throw ExecError("bucket " + bucket.name + ": is cut into " + std::to_string(boxes) +
                        " boxes; buffers are one box");
      }
    }
  }

  std::vector<OwnedSpan> read_group(const std::string& place, const Reader& data) const {
    std::vector<OwnedSpan> group = data.list([](const Reader& each) {
      return OwnedSpan{each.item(0).id<RankId>(), each.item(1).integer(), each.item(2).integer()};
    });
    std::stable_sort(group.begin(), group.end(), [](const auto& a, const auto& b) { return a.lo < b.lo; });
    std::int64_t covered = 0;
    for (const OwnedSpan& span : group) {
      if (span.lo == span.hi) continue;
      if (span.lo != covered || (span.hi - span.lo) % spec_.granule != 0) {
        throw ExecError(place + ": the samples of its ranks must follow each other in whole granules of " +
                        std::to_string(spec_.granule) + "; " + text_of(span.rank) + " has " +
                        span_text(span.lo, span.hi));
      }
      covered = span.hi;
    }
    return group;
  }

  // --- Units

  template <class Id>
  static Id expect_index(const std::string& place, const Reader& data, std::size_t count) {
    const std::int64_t index = data.integer();
    if (index < 0 || index >= static_cast<std::int64_t>(count)) {
      throw ExecError(place + ": index " + std::to_string(index) + " of " + std::to_string(count));
    }
    return Id(index);
  }

  // The elements of its bucket that a parameter or buffer takes.
  static Span elements_of(const Parameter& parameter) {
    if (!parameter.dtype) return {parameter.offset, parameter.offset + numel_of(parameter.shape)};
    const auto size = static_cast<std::int64_t>(c10::elementSize(*parameter.dtype));
    const std::int64_t bytes = numel_of(parameter.shape) * size;
    return {parameter.offset, parameter.offset + (bytes + kWordBytes - 1) / kWordBytes};
  }

  // Of ("param", bucket, offset, shape) or ("mutable", bucket, offset, shape, dtype).
  Parameter read_place(const std::string& place, const Reader& data) const {
    Parameter parameter{expect_index<BucketId>(place, data.item(1), spec_.buckets.size()), data.item(2).integer(),
                        data.item(3).list(kIntegers), std::nullopt};
    if (data.item(0).text() == "mutable") parameter.dtype = dtype_of(data.item(4));
    const BucketSpec& bucket = spec_.buckets[parameter.bucket.index()];
    const auto [lo, hi] = elements_of(parameter);
    if (lo < 0 || hi > bucket.numel) {
      throw ExecError("bucket " + bucket.name + ": a parameter at " + span_text(lo, hi) + " lies outside its " +
                      std::to_string(bucket.numel) + " elements");
    }
    if (!parameter.dtype) return parameter;
    const auto size = static_cast<std::int64_t>(c10::elementSize(*parameter.dtype));
    if (lo * kWordBytes % size != 0 || bucket.numel * kWordBytes % size != 0) {
      throw ExecError("bucket " + bucket.name + ": a buffer of elements of " + std::to_string(size) +
                      " bytes begins at word " + std::to_string(lo) + " of " + std::to_string(bucket.numel) +
                      "; both must be multiples");
    }
    return parameter;
  }

  Parameter read_parameter(const std::string& place, const Reader& data) const {
    const Parameter parameter = read_place(place, data);
    const BucketSpec& bucket = spec_.buckets[parameter.bucket.index()];
    const std::int64_t last = elements_of(parameter).hi;
    for (const BoxSpec& box : spec_.boxes) {
      const bool touched = box.bucket() == parameter.bucket && box.lo < last && parameter.offset < box.hi;
      if (!touched || contains(box.roles.readers, spec_.rank)) continue;
      throw ExecError("bucket " + bucket.name + ": " + text_of(spec_.rank) + " has a unit that computes with " +
                      span_text(box.lo, box.hi) + ", of which it is no reader");
    }
    return parameter;
  }

  BorderValue read_border_value(const std::string& place, const Reader& data) const {
    return {expect_index<ValueId>(place, data.item(1), spec_.values.size())};
  }

  InputBinding read_input(const std::string& place, const Reader& data) const {
    const std::string& kind = data.item(0).text();
    if (kind == "param" || kind == "mutable") return read_parameter(place, data);
    if (kind == "constant" || kind == "frozen" || kind == "buffer") {
      return TableEntry{table_named(place, data.item(1).text())};
    }
    if (kind == "value") return read_border_value(place, data);
    if (kind == "input") return BatchInput{data.item(1).text()};
    if (kind == "keys") return SampleKeys{};
    if (kind == "step_keys") return StepKeys{};
    if (kind == "none") throw ExecError(place + ": an input comes from somewhere");
    throw ExecError(place + ": no kind of input: \"" + kind + "\"");
  }

  OutputBinding read_output(const std::string& place, const Reader& data) const {
    const std::string& kind = data.item(0).text();
    if (kind == "value") return read_border_value(place, data);
    if (kind == "loss") return Loss{};
    if (kind == "count") return Count{};
    if (kind == "none") return Nothing{};
    if (kind != "fold") throw ExecError(place + ": no kind of output: \"" + kind + "\"");
    const auto update = expect_index<BufferUpdateId>(place, data.item(1), spec_.updates.size());
    const std::size_t number = count_of(data.item(2));
    if (number >= spec_.updates[update.index()].values.size()) {
      throw ExecError(place + ": buffer update " + std::to_string(update.value()) + " has no value " +
                      std::to_string(number));
    }
    return UpdateValue{update, number};
  }

  GradientBinding read_gradient(const std::string& place, const Reader& data) {
    const std::string& kind = data.item(0).text();
    if (kind == "param") {
      const Parameter parameter = read_parameter(place, data);
      check_region(parameter);
      return parameter;
    }
    if (kind == "value") return read_border_value(place, data);
    if (kind == "none") return Nothing{};
    throw ExecError(place + ": no kind of gradient: \"" + kind + "\"");
  }

  // Gradients are summed in place, parameter by parameter; one parameter may be in several units.
  void check_region(const Parameter& parameter) {
    const std::int64_t lo = parameter.offset, hi = lo + numel_of(parameter.shape);
    auto& regions = regions_[parameter.bucket];
    for (const Span& other : regions) {
      if (other.lo == lo && other.hi == hi) return;
      if (lo < other.hi && other.lo < hi) {
        throw ExecError("bucket " + spec_.buckets[parameter.bucket.index()].name + ": parameters at " +
                        std::to_string(lo) + " and " + std::to_string(other.lo) + " overlap");
      }
    }
    regions.push_back({lo, hi});
  }

  template <class Read>
  static auto read_bindings(const std::string& place, const Reader& data, Read read) {
    std::size_t number = 0;
    return data.list([&](const Reader& each) { return read(place + " " + std::to_string(number++), each); });
  }

  std::optional<Modelled> read_modelled(const std::string& place, const Reader& data) const {
    return data.optional([&](const Reader& costs) {
      const Modelled modelled{costs.item(0).real(), costs.item(1).real(), costs.item(2).real(), costs.item(3).real()};
      if (!(modelled.weights_share >= 0.0 && modelled.weights_share <= 1.0)) {
        throw ExecError(place + ": a share of " + std::to_string(modelled.weights_share) + "; shares are from 0 to 1");
      }
      for (const double seconds : {modelled.forward_s, modelled.backward_s, modelled.fixed_s}) {
        if (std::isfinite(seconds) && seconds >= 0.0) continue;
        throw ExecError(place + ": a modelled duration of " + std::to_string(seconds) +
                        " s; durations are finite and not negative");
      }
      return modelled;
    });
  }

  UnitSpec read_unit(const std::string& place, const Reader& data) {
    const auto input = [this](const std::string& at, const Reader& each) { return read_input(at, each); };
    const auto output = [this](const std::string& at, const Reader& each) { return read_output(at, each); };
    const auto gradient = [this](const std::string& at, const Reader& each) { return read_gradient(at, each); };
    const auto program = [&](const Reader& name) { return program_named(place, name.text()); };
    UnitSpec unit;
    unit.forward = data.field("forward").optional(program);
    unit.backward = data.field("backward").optional(program);
    unit.backward_inputs = data.field("backward_inputs").optional(program);
    unit.backward_weights = data.field("backward_weights").optional(program);
    unit.evaluate = data.field("evaluate").optional(program);
    unit.inputs = read_bindings(place + ", input", data.field("inputs"), input);
    unit.eval_inputs = read_bindings(place + ", eval input", data.field("eval_inputs"), input);
    unit.outputs = read_bindings(place + ", output", data.field("outputs"), output);
    unit.eval_outputs = read_bindings(place + ", eval output", data.field("eval_outputs"), output);
    unit.grads = read_bindings(place + ", gradient", data.field("grads"), gradient);
    unit.num_saved = count_of(data.field("num_saved"));
    unit.num_held = count_of(data.field("num_held"));
    unit.modelled = read_modelled(place, data.field("modelled"));
    check_programs(place, unit);
    return unit;
  }

  void check_programs(const std::string& place, const UnitSpec& unit) const {
    const auto tangents = std::count_if(unit.outputs.begin(), unit.outputs.end(), [this](const OutputBinding& output) {
      const auto* value = std::get_if<BorderValue>(&output);
      return std::holds_alternative<Loss>(output) || (value && spec_.values[value->value.index()].has_grad);
    });
    if (unit.forward) check_program(place, *unit.forward, unit.inputs.size(), unit.outputs.size() + unit.num_saved);
    const std::size_t given = unit.num_saved + static_cast<std::size_t>(tangents);
    if (unit.backward) check_program(place, *unit.backward, given, unit.grads.size());
    if (unit.backward_inputs) check_program(place, *unit.backward_inputs, given, unit.grads.size() + unit.num_held);
    if (unit.backward_weights) check_program(place, *unit.backward_weights, unit.num_held, unit.grads.size());
    if (unit.evaluate) check_program(place, *unit.evaluate, unit.eval_inputs.size(), unit.eval_outputs.size());
  }

  void read_units() {
    const Reader units = data_.field("units");
    for (std::size_t i = 0; i < units.size(); ++i) {
      const auto id = units.item(i).field("index").id<UnitId>();
      const std::string place = "unit " + std::to_string(id.value());
      if (!spec_.units.emplace(id, read_unit(place, units.item(i))).second) throw ExecError(place + " is given twice");
    }
  }

  // --- The step program

  static Step read_step(const Reader& data) {
    std::vector<std::int64_t> operands;
    for (std::size_t i = 1; i < data.size(); ++i) operands.push_back(data.item(i).integer());
    return parse_step(data.item(0).text(), operands);
  }

  void read_schedule() {
    const Reader data = data_.field("schedule");
    Schedule& schedule = spec_.schedule;
    schedule.micro_batches = data.field("micro_batches").list([](const Reader& span) {
      return SampleSpan{span.field("lo").integer(), span.field("hi").integer()};
    });
    schedule.rows = {0};
    for (const SampleSpan& span : schedule.micro_batches) schedule.rows.push_back(schedule.rows.back() + span.size());
    if (spec_.keys.starts.size() != schedule.micro_batches.size()) {
      throw ExecError("keys: " + std::to_string(spec_.keys.starts.size()) + " starts are given for " +
                      std::to_string(schedule.micro_batches.size()) + " micro-batches");
    }
    const Declared declared{spec_.values, spec_.units, spec_.buckets.size()};
    schedule.train =
        check_steps(data.field("train").list(read_step), schedule.micro_batches, declared, StepMode::kTrain);
    schedule.evaluate =
        check_steps(data.field("evaluate").list(read_step), schedule.micro_batches, declared, StepMode::kEval);
  }

  const Reader data_;
  const Names& names_;
  EngineSpec spec_;
  std::map<BucketId, std::vector<Span>> regions_;  // elements of gradients
};

}  // namespace

EngineSpec read_spec(const Data& data, const Names& names) { return SpecReader(Reader(data, "spec"), names).read(); }

void check_successor(const EngineSpec& before, const EngineSpec& after) {
  const auto expect_same = [](const std::string& what, bool same) {
    if (!same)
      throw ExecError("install: " + what + " is another one; what is computed stays, a new plan moves it only");
  };
  expect_same("the rank", before.rank == after.rank);
  expect_same("the seed", before.keys.seed == after.keys.seed);
  expect_same("the global batch", before.global_batch == after.global_batch);
  expect_same("the granule", before.granule == after.granule);
  expect_same("the kind of sums", before.exact == after.exact);
  expect_same("the dtype of records", before.record_dtype == after.record_dtype);
  expect_same("the copy mode", before.copy_mode == after.copy_mode);
  expect_same("the number of buckets", before.buckets.size() == after.buckets.size());
  for (std::size_t i = 0; i < before.buckets.size(); ++i) {
    const BucketSpec &old = before.buckets[i], &next = after.buckets[i];
    expect_same("bucket " + old.name, old.name == next.name && old.numel == next.numel && old.dtype == next.dtype &&
                                          old.optimizer == next.optimizer && old.hyper_group == next.hyper_group);
  }
  expect_same("the number of boxes", before.boxes.size() == after.boxes.size());
  for (std::size_t i = 0; i < before.boxes.size(); ++i) {
    const BoxSpec &old = before.boxes[i], &next = after.boxes[i];
    expect_same("box " + std::to_string(i), old.bucket() == next.bucket() && old.lo == next.lo && old.hi == next.hi);
  }
}

}  // namespace elaswave::exec
