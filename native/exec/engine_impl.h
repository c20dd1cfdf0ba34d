// The engine's parts and the interpreter. Private to exec/.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "boxes.h"
#include "buckets.h"
#include "courier.h"
#include "emulation.h"
#include "engine.h"
#include "folds.h"
#include "optimizer.h"
#include "schedule.h"
#include "values.h"

namespace elaswave::exec {

// A binding with what can be looked up once.
struct Resolved {
  Binding binding;
  c10::IValue constant;  // kParam, kTable: the tensor
  int region = -1;       // gradients: where Buckets accumulates
};

struct ResolvedUnit {
  std::vector<Resolved> inputs, grads, eval_inputs;
  std::vector<int> buckets;  // whose working copies the unit reads
};

class Engine::Impl {
 public:
  Impl(int rank, std::shared_ptr<comm::Endpoint> endpoint, std::int64_t seed, std::int64_t global_batch,
       std::int64_t granule);

  // Declarations and state (engine.cc).
  int add_program(const std::string& name, ProgramSpec spec);
  int add_bucket(BucketSpec spec);
  int add_box(BoxSpec spec);
  void assign_box(int box, int owner, std::vector<int> holders);
  int add_table(const std::string& name, at::Tensor tensor);
  int add_value(ValueSpec spec);
  int add_fold(FoldSpec spec);
  void regroup_fold(int fold, std::vector<OwnedSpan> group);
  void add_unit(int unit, UnitSpec spec);
  void clear_units();
  std::size_t state_tensors(int box) const;
  void set_world(std::vector<int> ranks);
  void set_schedule(Schedule schedule);
  int find_table(const std::string& name) const;
  int expect_box(int box) const;

  // Running (interpreter.cc).
  StepResult step(std::int64_t step_index, const Inputs& inputs, const std::vector<std::vector<double>>& hyper,
                  const StepOptions& options);
  EvalResult evaluate(std::int64_t step_index, const Inputs& inputs, double deadline_s);
  void sync(double deadline_s);
  void refresh_work(const std::vector<std::vector<int>>& wanted, double deadline_s);
  StepResult commit_pending(const Votes& votes);
  void drop_pending() noexcept;
  Progress progress() const;

  Courier courier;
  Values values;
  Buckets buckets;
  Boxes boxes;
  Folds folds;
  std::vector<at::Tensor> table;
  std::int64_t version = 0;
  std::optional<StepResult> last_committed;
  bool pending = false;
  Votes votes;

 private:
  // engine.cc
  void check_program(const std::string& place, int program, std::size_t inputs, std::size_t outputs) const;
  void check_bindings(const std::string& place, const std::vector<Binding>& bindings, bool are_inputs) const;
  void check_unit(const std::string& place, const UnitSpec& spec) const;
  void check_inputs(const Inputs& inputs) const;
  ResolvedUnit resolve(const UnitSpec& spec);
  Resolved resolve_input(const Binding& binding) const;

  // units.cc
  void forward(const Step& step, bool train);
  void keep_outputs(const Step& step, const std::vector<Binding>& bindings, std::vector<c10::IValue>& outputs);
  void backward(const Step& step);
  c10::IValue input_of(const Resolved& input, const Step& step);
  at::Tensor batch_input(const std::string& name, std::int64_t micro_batch) const;
  void emulate(double seconds_per_sample, const Step& step);
  // Outputs of the declared shapes of a unit that was not computed.
  std::vector<c10::IValue> stand_ins(const std::vector<Binding>& bindings, const Step& step);

  // interpreter.cc
  void begin(std::int64_t step_index, const Inputs& inputs, double deadline_s);
  void run(const StepList& list, StepResult* result);
  void execute(const Step& step);
  void vote();
  void cast(const std::vector<std::uint64_t>& words, std::int64_t channel);
  void tally();
  void decide(double square);
  void commit();
  void update(const BoxSpec& box, Base& base, const at::Tensor& gradient, const Hyper& hyper);
  void update_owned(std::int64_t bucket);
  void update_held();
  void fault_if_due(std::optional<OpCode> next) const;
  void finish_committed(const StepList& list, std::size_t at) noexcept;
  void recover(const StepList& list, std::size_t at) noexcept;
  void drop_transients() noexcept;

  static constexpr std::uint64_t kNoPlace = ~std::uint64_t{0};
  const std::int64_t seed_, global_batch_, granule_;
  std::vector<std::unique_ptr<UnitProgram>> programs_;
  std::map<int, Optimizer> optimizers_;  // by program, made when they are used
  std::vector<std::string> table_names_;
  std::map<int, UnitSpec> units_;
  std::map<int, ResolvedUnit> resolved_;
  std::vector<int> world_;
  bool ready_ = false;  // declarations are unchanged since set_schedule
  StepList train_, eval_;
  std::vector<SampleSpan> micro_batches_;
  std::int64_t first_sample_ = 0;

  EmulatedDevice device_;

  // Of the step that runs.
  std::int64_t step_index_ = 0;
  const Inputs* inputs_ = nullptr;
  Hyper hyper_;  // per group: grad_scale, then the caller's
  StepOptions options_;
  bool voted_ = false;
  bool committed_ = false;
  double loss_ = 0.0, count_ = 0.0;
  Consumed consumed_;
  at::ScalarType loss_dtype_ = at::kFloat;
  StepResult result_;
  std::atomic<std::uint64_t> place_{kNoPlace};  // opcode and number of the instruction that runs
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<c10::IValue>> saved_;  // (unit, micro-batch)
};

}  // namespace elaswave::exec
