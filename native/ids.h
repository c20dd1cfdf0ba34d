// Indices that the compiler keeps apart: a box is no bucket, and an absent one is an empty std::optional, never -1.
//
//   BoxId box(3);  boxes[box.index()];  std::to_string(box.value())
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <ranges>

namespace elaswave {

template <class Tag>
class Id {
 public:
  constexpr Id() = default;
  constexpr explicit Id(std::int64_t value) : value_(value) {}
  static constexpr Id at(std::size_t index) { return Id(static_cast<std::int64_t>(index)); }
  constexpr std::int64_t value() const { return value_; }
  constexpr std::size_t index() const { return static_cast<std::size_t>(value_); }  // into a vector of what it numbers
  constexpr auto operator<=>(const Id&) const = default;

 private:
  std::int64_t value_ = 0;
};

using RankId = Id<struct RankTag>;
using BoxId = Id<struct BoxTag>;
using BucketId = Id<struct BucketTag>;
using UnitId = Id<struct UnitTag>;
using ValueId = Id<struct ValueTag>;
using ProgramId = Id<struct ProgramTag>;
using TableId = Id<struct TableTag>;
using BufferUpdateId = Id<struct BufferUpdateTag>;

// The ids of `count` things, in order:  for (const BoxId box : all_ids<BoxId>(boxes.size()))
template <class Id>
constexpr auto all_ids(std::size_t count) {
  return std::views::iota(std::size_t{0}, count) | std::views::transform([](std::size_t i) { return Id::at(i); });
}

}  // namespace elaswave

template <class Tag>
struct std::hash<elaswave::Id<Tag>> {
  std::size_t operator()(const elaswave::Id<Tag>& id) const { return std::hash<std::int64_t>()(id.value()); }
};
