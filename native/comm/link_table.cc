#include "comm/link_table.h"

#include <algorithm>
#include <mutex>

namespace elaswave::comm {

LinkTable::LinkPtr LinkTable::find(int peer) const {
  const std::shared_lock lock(mutex_);
  const auto it = table_.find(peer);
  return it == table_.end() ? nullptr : it->second;
}

bool LinkTable::has_live(int peer) const {
  const LinkPtr link = find(peer);
  return link && !link->lost();
}

std::map<int, LinkTable::LinkPtr> LinkTable::links() const {
  const std::shared_lock lock(mutex_);
  return table_;
}

std::vector<int> LinkTable::lost() const {
  const std::shared_lock lock(mutex_);
  std::vector<int> ranks;
  for (const auto& [rank, link] : table_) {
    if (link->lost()) ranks.push_back(rank);
  }
  return ranks;
}

bool LinkTable::put(const LinkPtr& link) {
  {
    const std::unique_lock lock(mutex_);
    const auto before = table_.find(link->peer());
    if (before != table_.end() && !before->second->lost()) return false;
    link->advance(generation_.load());
    if (aborted_) link->abort(aborted_);
    table_[link->peer()] = link;
  }
  changed_.notify_all();
  return true;
}

void LinkTable::wait_for_change(Deadline deadline) const {
  std::shared_lock lock(mutex_);
  changed_.wait_until(lock, deadline.at());
}

bool LinkTable::advance(std::uint32_t generation) {
  const std::unique_lock lock(mutex_);
  if (generation < generation_.load()) return false;
  generation_.store(generation);
  aborted_ = nullptr;
  is_aborted_.store(false);
  for (const auto& [rank, link] : table_) link->advance(generation);
  return true;
}

FailurePtr LinkTable::aborted() const {
  if (!is_aborted_.load()) return nullptr;
  const std::shared_lock lock(mutex_);
  return aborted_;
}

void LinkTable::abort(const FailurePtr& failure) {
  const std::unique_lock lock(mutex_);
  abort_links(failure);
}

void LinkTable::abort_links(const FailurePtr& failure) {
  if (aborted_) return;
  aborted_ = failure;
  is_aborted_.store(true);
  for (const auto& [rank, link] : table_) link->abort(aborted_);
}

std::vector<LinkTable::LinkPtr> LinkTable::broadcast_abort(const FailurePtr& failure, std::uint32_t generation,
                                                           int own_rank) {
  const std::unique_lock lock(mutex_);
  if (generation != generation_.load()) return {};  // it has ended
  abort_links(failure);
  if (broadcast_generation_ && *broadcast_generation_ >= generation) return {};
  broadcast_generation_ = generation;
  std::vector<LinkPtr> ring, chosen;
  for (auto it = table_.upper_bound(own_rank); it != table_.end(); ++it) ring.push_back(it->second);
  for (auto it = table_.begin(); it != table_.end() && it->first < own_rank; ++it) ring.push_back(it->second);
  std::erase_if(ring, [](const LinkPtr& link) { return link->lost() != nullptr; });
  for (std::size_t distance = 1; distance <= ring.size(); distance *= 2) chosen.push_back(ring[distance - 1]);
  return chosen;
}

}  // namespace elaswave::comm
