// The engine's parts and the interpreter. Private to exec/.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "buckets.h"
#include "courier.h"
#include "engine.h"
#include "folds.h"
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
  int add_table(const std::string& name, at::Tensor tensor);
  int add_value(ValueSpec spec);
  int add_fold(FoldSpec spec);
  void add_unit(int unit, UnitSpec spec);
  void set_world(std::vector<int> ranks);
  void set_schedule(Schedule schedule);
  int find_table(const std::string& name) const;

  // Running (interpreter.cc).
  StepResult step(std::int64_t step_index, const Inputs& inputs, const std::vector<std::vector<double>>& hyper,
                  std::optional<double> clip_norm, double deadline_s);
  EvalResult evaluate(std::int64_t step_index, const Inputs& inputs, double deadline_s);
  void sync(double deadline_s);
  void refresh_work(double deadline_s);

  Courier courier;
  Values values;
  Buckets buckets;
  Folds folds;
  std::vector<at::Tensor> table;
  std::int64_t version = 0;
  std::optional<StepResult> last_committed;

 private:
  // engine.cc
  void check_program(const std::string& place, int program, std::size_t inputs, std::size_t outputs) const;
  void check_bindings(const std::string& place, const std::vector<Binding>& bindings, bool are_inputs) const;
  void check_unit(const std::string& place, const UnitSpec& spec) const;
  void check_inputs(const Inputs& inputs) const;
  ResolvedUnit resolve(const UnitSpec& spec);
  Resolved resolve_input(const Binding& binding) const;

  // interpreter.cc
  void begin(std::int64_t step_index, const Inputs& inputs, double deadline_s);
  void run(const StepList& list, StepResult* result);
  void execute(const Step& step);
  void forward(const Step& step, bool train);
  void keep_outputs(const Step& step, const std::vector<Binding>& bindings, std::vector<c10::IValue>& outputs);
  void backward(const Step& step);
  c10::IValue input_of(const Resolved& input, const Step& step);
  at::Tensor batch_input(const std::string& name, std::int64_t micro_batch) const;
  void vote();
  void decide(double square);
  std::vector<std::vector<double>> all_gather(const std::vector<double>& mine, std::int64_t channel);
  void update(std::int64_t bucket);
  void recover(const StepList& list, std::size_t at) noexcept;
  void drop_transients() noexcept;

  const std::int64_t seed_, global_batch_, granule_;
  std::vector<std::unique_ptr<UnitProgram>> programs_;
  std::vector<std::string> table_names_;
  std::map<int, UnitSpec> units_;
  std::map<int, ResolvedUnit> resolved_;
  std::vector<int> world_;
  bool ready_ = false;  // declarations are unchanged since set_schedule
  StepList train_, eval_;
  std::vector<SampleSpan> micro_batches_;
  std::int64_t first_sample_ = 0;

  // Of the step that runs.
  std::int64_t step_index_ = 0;
  const Inputs* inputs_ = nullptr;
  std::vector<std::vector<at::Tensor>> hyper_;  // per group: grad_scale, then the caller's
  std::optional<double> clip_norm_;
  bool committed_ = false;
  double loss_ = 0.0, count_ = 0.0;
  at::ScalarType loss_dtype_ = at::kFloat;
  StepResult result_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<c10::IValue>> saved_;  // (unit, micro-batch)
};

}  // namespace elaswave::exec
