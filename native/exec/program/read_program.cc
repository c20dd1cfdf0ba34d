#include "exec/program/read_program.h"

#include <map>
#include <string>

namespace elaswave::exec {
namespace {

constexpr auto kSlot = [](const Reader& item) { return static_cast<int>(item.integer()); };

Arg read_arg(const Reader& data) {
  static const std::map<std::string, Arg::Kind> kinds = {
      {"slot", Arg::Kind::kSlot},     {"none", Arg::Kind::kNone},
      {"bool", Arg::Kind::kBool},     {"int", Arg::Kind::kInt},
      {"float", Arg::Kind::kReal},    {"str", Arg::Kind::kString},
      {"dtype", Arg::Kind::kDtype},   {"device", Arg::Kind::kDevice},
      {"layout", Arg::Kind::kLayout}, {"memory_format", Arg::Kind::kMemoryFormat},
      {"list", Arg::Kind::kList},
  };
  const std::string& name = data.item(0).text();
  const auto found = kinds.find(name);
  if (found == kinds.end()) throw ExecError("program: unknown kind of argument \"" + name + "\"");
  Arg arg;
  arg.kind = found->second;
  switch (arg.kind) {
    case Arg::Kind::kNone:
      break;
    case Arg::Kind::kBool:
      arg.integer = data.item(1).boolean() ? 1 : 0;
      break;
    case Arg::Kind::kSlot:
    case Arg::Kind::kInt:
      arg.integer = data.item(1).integer();
      break;
    case Arg::Kind::kReal:
      arg.real = data.item(1).real();
      break;
    case Arg::Kind::kList:
      arg.items = data.item(1).list(read_arg);
      break;
    default:
      arg.text = data.item(1).text();
  }
  return arg;
}

Instruction read_instruction(const Reader& data) {
  Instruction instruction;
  instruction.op = data.field("op").text();
  if (const auto overload = data.find("overload")) instruction.overload = overload->text();
  instruction.args = data.field("args").list(read_arg);
  instruction.outs = data.field("outs").list(kSlot);
  if (const auto frees = data.find("frees")) instruction.frees = frees->list(kSlot);
  if (const auto unpack = data.find("unpack")) instruction.unpack = unpack->boolean();
  return instruction;
}

}  // namespace

ProgramSpec read_program(const Reader& data) {
  ProgramSpec spec;
  spec.name = data.field("name").text();
  spec.num_inputs = static_cast<int>(data.field("num_inputs").integer());
  spec.num_slots = static_cast<int>(data.field("num_slots").integer());
  spec.outputs = data.field("outputs").list(kSlot);
  spec.instructions = data.field("instructions").list(read_instruction);
  return spec;
}

}  // namespace elaswave::exec
