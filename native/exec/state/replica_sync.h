// Keeps the replicas of boxes equal: what travels between the owner of a box and the ranks that hold it too. The states
// and sums are the shard store's; this is what is sent of them, and what comes for them. It decides nothing:
// commit/machine.h says what is sent, awaited and dropped, the engine hands it the machine's actions, and it tells the
// machine how it went. Private to exec/.
//
//   records of the step    a holder updates its replica with the owner's sum; the vote waits for them
//   states                 to a rank that shall hold the box and has nothing of it, in bulk beside the steps
//   catch-up records       of the steps since the state left, one by one after it, until the replica is nearly in sync
//                          and the vote waits for its records too
//
// A record travels with a header: per box, the tag of the owner's state that it belongs to, and its own digest. A state
// travels with its tag. Records of the step of a run, which are neighbours with equal roles, share a message; records
// of syncing replicas travel box by box. What travels in bulk is looked at once after each step, and a record that an
// owner sends so lags at most kLagSteps steps, or one if no state is on its way: else its vote waits.
//
//   begin_step -> send_states ... hear_answers -> wait_records -> wait_sends -> (votes, commit) -> take_states
//     -> end_step
//
// Threads: the engine's, and no other. After a failure (what transfers throw, ExecError) the engine cancels all
// transfers and calls `abandon_transfers`; states that were on their way are not sent again by themselves: the machine
// takes their replicas for lost.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "commit/machine.h"
#include "exec/device/tensor_transfers.h"
#include "exec/state/shard_store.h"

namespace elaswave::exec {

class ReplicaSync {
 public:
  // `state_tensors`: how many tensors the optimizer keeps beside the master of a box.
  ReplicaSync(commit::StepMachine& machine, TensorTransfers& transfers, ShardStore& shards,
              std::function<std::size_t(const BoxSpec&)> state_tensors, Perform perform)
      : machine_(machine),
        transfers_(transfers),
        shards_(shards),
        state_tensors_(std::move(state_tensors)),
        perform_(std::move(perform)) {}

  // Roles have changed, which the store and the machine have taken over: what was on its way is given up.
  void install();

  // --- Of the machine's actions

  void send_record(commit::BoxRange boxes, RankId holder);
  void expect_record(commit::BoxRange boxes, RankId owner);
  // After the state that `holder` was sent: in bulk, or with the messages of the step.
  void send_catch_up(BoxId box, RankId holder, comm::Lane lane);
  void expect_catch_up(BoxId box, RankId owner);
  void send_state(BoxId box, RankId holder);
  void expect_state(BoxId box, RankId owner);
  // To the owner of a state that has come: the replica is nearly in sync; or it was of no use, and another is wanted.
  void report_nearly_in_sync(BoxId box, RankId owner);
  void ask_state(BoxId box, RankId owner);
  // Of the box nothing is awaited any more.
  void forget(BoxId box);

  // --- Along a step

  // States that others shall hold: sends those whose turn has come, and hears what became of them; never blocks.
  void send_states();
  // Hears what became of states that others were sent; never blocks. Before the sums, whose records depend on it.
  void hear_answers();
  // Waits for the records, and states, that the next vote waits for.
  void wait_records();
  // Waits until the records of the step are sent, and the catch-up records that may lag no more.
  void wait_sends();
  // Takes the states that have arrived, and their catch-up records, but for those that the next vote waits for. After
  // the updates of a step; never blocks.
  void take_states();
  void end_step();
  // After `TensorTransfers::drop`: nothing is under way any more.
  void abandon_transfers();

  // --- Figures

  // Handed to the links for replicas so far: records, states and their headers.
  std::uint64_t copied_bytes() const { return copied_bytes_; }
  // Since the roles were installed, at most at once: states that others were sent, and were still being sent; and, with
  // the records of the steps until they are here, states that come or have come.
  std::uint64_t sent_at_once() const { return sent_at_once_; }
  std::uint64_t sync_peak() const { return sync_peak_; }

 private:
  struct RecordReceive {  // of the step; at its first box
    commit::BoxRange boxes{BoxId()};
    at::Tensor record, header;  // as they travel; used again
    std::vector<comm::Transfer> transfers;
  };
  struct CatchUpReceive {
    at::Tensor record, header;
    std::vector<comm::Transfer> transfers;
  };
  struct StateTransfer {
    std::vector<comm::Transfer> transfers;
    at::Tensor header;
    std::vector<at::Tensor> tensors;  // master, state...
  };
  struct Incoming {  // of a box
    std::optional<StateTransfer> state;
    std::deque<CatchUpReceive> records;
    bool came = false;  // since the roles were installed
  };
  struct CatchUpSend {  // to be sent in bulk, of the step that leads to `version`
    std::int64_t version;
    at::Tensor record, header;
  };
  // A replica that another rank shall hold. States are sent in bulk, one after the other, each as it is when its turn
  // comes: so what is held for them here is bounded, and few records are made while one is under way.
  struct Outgoing {
    BoxId box;
    RankId holder;
    std::vector<comm::Transfer> sends;
    std::size_t bytes = 0;
    at::Tensor answer;  // a word, of the holder
    comm::Transfer answered;
    bool nearly_in_sync = false;      // said the last answer
    std::vector<CatchUpSend> unsent;  // of the step, until its own messages have been sent
    // Its catch-up records that are under way, by the version that they lead to, until they were sent; votes have
    // waited for those up to `awaited`.
    std::map<std::int64_t, std::vector<comm::Transfer>> catch_up;
    std::int64_t awaited = 0;
  };

  Incoming& incoming(BoxId box) { return incoming_[box.index()]; }
  bool are_done(const std::vector<comm::Transfer>& transfers);
  comm::Transfer send(const at::Tensor& tensor, RankId holder, std::uint64_t tag, comm::Lane lane);
  const at::Tensor& header_of(const ShardStore::Sum& sum);
  void take_record(BoxId first);
  void send_state(Outgoing& replica, comm::Lane lane);
  void ask_anew(Outgoing& replica);
  void expect_answer(Outgoing& replica);
  void answer(BoxId box, RankId owner, std::int64_t word);
  void take_state(BoxId box);
  void take_what_came(BoxId box);
  void take_catch_up(BoxId box);
  void send_catch_up_records();
  void await_catch_up_sends();
  void forget_all();
  std::uint64_t sync_bytes() const;

  commit::StepMachine& machine_;
  TensorTransfers& transfers_;
  ShardStore& shards_;
  std::function<std::size_t(const BoxSpec&)> state_tensors_;
  Perform perform_;
  std::vector<Incoming> incoming_;  // by box
  std::deque<Outgoing> due_;
  std::list<Outgoing> under_way_;  // until they are asked for anew, or the roles change
  std::uint64_t copied_bytes_ = 0;
  std::uint64_t sent_at_once_ = 0, sync_peak_ = 0;
  // Of the step.
  std::vector<RecordReceive> records_;   // one for each box, used of those that are first
  std::map<BoxId, at::Tensor> headers_;  // of sums that are sent, by the first box
  std::vector<comm::Transfer> sends_;    // of records
};

}  // namespace elaswave::exec
