// Plain data, what JSON can say, and a reader of it whose errors tell the place. No torch in here.
//
//   Reader spec(data, "spec");
//   spec.field("boxes").item(3).field("owner").integer()     throws "spec.boxes[3].owner: ..." unless it is one
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace elaswave::exec {

struct Field;

struct Data {
  using List = std::vector<Data>;
  using Map = std::vector<Field>;  // in the order in which it was written
  std::variant<std::monostate, bool, std::int64_t, double, std::string, List, Map> value;
};

struct Field {
  std::string name;
  Data data;
};

// One node of plain data. Cheap to copy; the data must outlive it. All getters throw ExecError for another kind.
class Reader {
 public:
  // `name`: what the whole is called in messages.
  Reader(const Data& root, const char* name) : root_(&root), node_(&root), name_(name) {}

  bool is_none() const { return std::holds_alternative<std::monostate>(node_->value); }
  bool boolean() const;
  std::int64_t integer() const;
  double real() const;  // an integer, too
  const std::string& text() const;
  std::size_t size() const;              // of a list
  Reader item(std::size_t index) const;  // of a list
  Reader field(std::string_view name) const;
  std::optional<Reader> find(std::string_view name) const;  // a field that may be missing
  std::vector<std::string> names() const;                   // of all fields

  // Each item of a list, as `read` makes it of a Reader.
  template <class Read>
  auto list(Read read) const {
    std::vector<decltype(read(*this))> found;
    const std::size_t count = size();
    found.reserve(count);
    for (std::size_t i = 0; i < count; ++i) found.push_back(read(item(i)));
    return found;
  }
  // None, or what `read` makes.
  template <class Read>
  auto optional(Read read) const {
    return is_none() ? std::nullopt : std::make_optional(read(*this));
  }
  template <class Id>
  Id id() const {
    return Id(integer());
  }

  std::string place() const;
  [[noreturn]] void fail(const std::string& fact) const;

 private:
  Reader(const Data* root, const Data* node, const char* name) : root_(root), node_(node), name_(name) {}
  template <class T>
  const T& expect(const char* kind) const;

  const Data* root_;
  const Data* node_;
  const char* name_;
};

}  // namespace elaswave::exec
