// The errors of the communication library.
//
// Every message names the place (rank, peer, tag), the fact and the rule that was broken. Thrown to callers only: the
// IO thread stores an error in the transfers that it concerns and never throws.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace elaswave::comm {

// A link or a group could not do what was asked. Base of the others.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A wait passed its deadline; the message names the peers and tags that are still awaited.
class DeadlineExceeded : public CommError {
 public:
  using CommError::CommError;
};

// `Endpoint::abort` was called, here or by a peer that broadcast it; the message is its reason.
class Aborted : public CommError {
 public:
  Aborted(const std::string& message, std::optional<int> suspect) : CommError(message), suspect_(suspect) {}
  std::optional<int> suspect() const { return suspect_; }  // whom the first to notice accuses, if anybody

 private:
  std::optional<int> suspect_;
};

// A peer died, closed its endpoint or its link broke.
class PeerLost : public CommError {
 public:
  PeerLost(const std::string& message, int rank, std::uint32_t epoch)
      : CommError(message), rank_(rank), epoch_(epoch) {}
  int rank() const { return rank_; }
  // The generation that the endpoint stood at when it noticed.
  std::uint32_t epoch() const { return epoch_; }

 private:
  int rank_;
  std::uint32_t epoch_;
};

}  // namespace elaswave::comm
