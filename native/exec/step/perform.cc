// What the commit machine says, done by the class whose job it is; votes and the commit are in interpreter.cc.
#include "exec/step/engine.h"

namespace elaswave::exec {

// One after the other; what a class tells the machine meanwhile may add more, which come first. Throws as transfers do,
// and as ShardStore::update does.
void Engine::perform(const commit::Actions& actions) {
  for (const commit::Action& action : actions) perform(action);
}

void Engine::perform(const commit::Action& action) {
  using Kind = commit::Action::Kind;
  const BoxId box = action.box.value_or(BoxId());
  const commit::BoxRange boxes(box, action.count);
  const RankId peer = action.peer.value_or(RankId());
  switch (action.kind) {
    case Kind::kSendPart:
      return shards_.send_part(boxes, peer);
    case Kind::kExpectPart:
      return shards_.expect_part(boxes, peer);
    case Kind::kSum:
      return shards_.sum(boxes);
    case Kind::kSendRecord:
      return replica_sync_.send_record(boxes, peer);
    case Kind::kExpectRecord:
      return replica_sync_.expect_record(boxes, peer);
    case Kind::kSendCatchUpRecord:
      return replica_sync_.send_catch_up(box, peer, comm::Lane::kBulk);
    case Kind::kSendPromptRecord:
      return replica_sync_.send_catch_up(box, peer, comm::Lane::kStep);
    case Kind::kExpectCatchUpRecord:
      return replica_sync_.expect_catch_up(box, peer);
    case Kind::kUpdate:
      return shards_.update(box, *action.version);
    case Kind::kWriteParameters:
      return shards_.write_parameters(box);
    case Kind::kSendParameters:
      return shards_.send_parameters(boxes, peer);
    case Kind::kExpectParameters:
      return shards_.expect_parameters(boxes, peer);
    case Kind::kSendState:
      return replica_sync_.send_state(box, peer);
    case Kind::kExpectState:
      return replica_sync_.expect_state(box, peer);
    case Kind::kReportNearlyInSync:
      return replica_sync_.report_nearly_in_sync(box, peer);
    case Kind::kAskState:
      return replica_sync_.ask_state(box, peer);
    case Kind::kDropState:
      shards_.set_state(box, {});
      return replica_sync_.forget(box);
    case Kind::kSendVote:
    case Kind::kExpectVote:
    case Kind::kLeaveStep:
    case Kind::kCommit:
      throw ExecError("a vote is cast by the engine's own instruction");
  }
}

}  // namespace elaswave::exec
