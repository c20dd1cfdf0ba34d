// Python's view of comm/: Endpoint, Transfer, Group. Buffers are contiguous CPU tensors or objects with the buffer
// protocol; everything that can block runs without the GIL.
#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "comm/endpoint.h"
#include "comm/group.h"

namespace py = pybind11;

namespace elaswave {
namespace {

using comm::Deadline;
using comm::Endpoint;
using comm::Group;
using comm::Interval;

// The memory of a Python object, kept alive.
struct Buffer {
  void* data = nullptr;
  std::size_t bytes = 0;
  std::optional<at::Tensor> tensor;
  std::shared_ptr<py::buffer_info> info;
};

at::Tensor as_tensor(const py::handle& object) {
  if (!THPVariable_Check(object.ptr())) throw py::type_error("a contiguous CPU tensor is needed");
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  if (!tensor.device().is_cpu() || !tensor.is_contiguous()) {
    throw py::value_error("only contiguous CPU tensors can be sent or received, got one on " + tensor.device().str());
  }
  return tensor;
}

Buffer as_buffer(const py::handle& object, bool writable) {
  Buffer buffer;
  if (THPVariable_Check(object.ptr())) {
    buffer.tensor = as_tensor(object);
    buffer.data = buffer.tensor->data_ptr();
    buffer.bytes = buffer.tensor->nbytes();
    return buffer;
  }
  auto info = py::reinterpret_borrow<py::buffer>(object).request(writable);
  std::ptrdiff_t stride = info.itemsize;
  for (std::size_t d = info.shape.size(); d-- > 0;) {
    if (info.shape[d] > 1 && info.strides[d] != stride) throw py::value_error("only contiguous buffers can be used");
    stride *= info.shape[d];
  }
  buffer.data = info.ptr;
  buffer.bytes = static_cast<std::size_t>(info.size * info.itemsize);
  buffer.info = std::make_shared<py::buffer_info>(std::move(info));
  return buffer;
}

// A transfer that keeps its buffer alive. Dropped before it is done, it is cancelled: nothing else holds the buffer.
class PyTransfer {
 public:
  PyTransfer(std::shared_ptr<Endpoint> endpoint, comm::Transfer transfer, Buffer buffer)
      : endpoint_(std::move(endpoint)), transfer_(std::move(transfer)), buffer_(std::move(buffer)) {}
  ~PyTransfer() {
    const py::gil_scoped_release release;
    endpoint_->cancel({&transfer_, 1});
  }
  PyTransfer(const PyTransfer&) = delete;
  PyTransfer& operator=(const PyTransfer&) = delete;
  const comm::Transfer& transfer() const { return transfer_; }

 private:
  std::shared_ptr<Endpoint> endpoint_;
  comm::Transfer transfer_;
  Buffer buffer_;
};

// `lane`: of a message that is sent; null: one is received.
std::unique_ptr<PyTransfer> post(const std::shared_ptr<Endpoint>& endpoint, std::optional<comm::Lane> lane, int peer,
                                 std::uint64_t tag, const py::object& object, std::optional<std::uint32_t> generation) {
  Buffer buffer = as_buffer(object, !lane);
  const std::uint32_t epoch = generation.value_or(endpoint->generation());
  comm::Transfer transfer;
  {
    const py::gil_scoped_release release;
    transfer = lane ? endpoint->send(peer, tag, buffer.data, buffer.bytes, epoch, *lane)
                    : endpoint->recv(peer, tag, buffer.data, buffer.bytes, epoch);
  }
  return std::make_unique<PyTransfer>(endpoint, std::move(transfer), std::move(buffer));
}

std::vector<comm::Transfer> unwrap(const std::vector<PyTransfer*>& transfers) {
  std::vector<comm::Transfer> plain;
  for (const PyTransfer* transfer : transfers) plain.push_back(transfer->transfer());
  return plain;
}

void wait_all(Endpoint& endpoint, const std::vector<PyTransfer*>& transfers, double timeout_s) {
  const std::vector<comm::Transfer> plain = unwrap(transfers);
  const py::gil_scoped_release release;
  endpoint.wait(plain, Deadline::after(timeout_s));
}

void wait_one(Endpoint& endpoint, const PyTransfer& transfer, double timeout_s) {
  const py::gil_scoped_release release;
  endpoint.wait(transfer.transfer(), Deadline::after(timeout_s));
}

std::vector<Interval> as_intervals(const std::vector<std::pair<std::size_t, std::size_t>>& pairs, std::size_t unit,
                                   std::size_t bound) {
  std::vector<Interval> intervals;
  for (const auto& [lo, hi] : pairs) {
    if (hi > bound) {
      throw py::value_error("interval [" + std::to_string(lo) + ", " + std::to_string(hi) + ") ends behind the " +
                            std::to_string(bound) + " elements of the tensor");
    }
    intervals.push_back({lo * unit, hi * unit});
  }
  return intervals;
}

using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

void all_gather(Group& group, const py::object& object, const Pairs& pairs, double timeout_s) {
  const at::Tensor tensor = as_tensor(object);
  const auto intervals = as_intervals(pairs, tensor.element_size(), static_cast<std::size_t>(tensor.numel()));
  void* const data = tensor.data_ptr();
  const py::gil_scoped_release release;
  group.all_gather(data, intervals, Deadline::after(timeout_s));
}

// Peers come as {rank: (host, port, host_id)}.
using PyPeers = std::map<int, std::tuple<std::string, std::uint16_t, std::string>>;

void connect(Endpoint& endpoint, const PyPeers& peers, double timeout_s) {
  std::map<int, comm::PeerAddress> table;
  for (const auto& [rank, address] : peers) {
    table[rank] = {std::get<0>(address), std::get<1>(address), std::get<2>(address)};
  }
  const py::gil_scoped_release release;
  endpoint.connect(table, Deadline::after(timeout_s));
}

const char* kind_name(comm::LinkKind kind) {
  switch (kind) {
    case comm::LinkKind::kTcp:
      return "tcp";
    case comm::LinkKind::kSharedMemory:
      return "shm";
    case comm::LinkKind::kNone:
      break;
  }
  return "none";
}

void set_error(const char* name, const std::string& message, std::optional<int> rank = std::nullopt) {
  const py::object type = py::module_::import("elaswave_fx.errors").attr(name);
  const py::object error = rank ? type(message, *rank) : type(message);
  PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const comm::PeerLost& error) {
    set_error("PeerLost", error.what(), error.rank());
  } catch (const comm::Aborted& error) {
    set_error("Aborted", error.what(), error.suspect());
  } catch (const comm::DeadlineExceeded& error) {
    set_error("DeadlineExceeded", error.what());
  } catch (const comm::CommError& error) {
    set_error("CommError", error.what());
  }
}

// Paces come as {rank: (latency in seconds, bytes per second)}.
using PyPaces = std::map<int, std::pair<double, double>>;

std::shared_ptr<Endpoint> make_endpoint(int rank, std::string token, std::string listen_host, std::uint16_t port,
                                        std::string host_id, bool allow_shm, double silence_timeout_s,
                                        const PyPaces& paces, bool may_be_cut) {
  comm::EndpointOptions options;
  options.rank = rank;
  options.token = std::move(token);
  options.host = std::move(listen_host);
  options.port = port;
  options.host_id = std::move(host_id);
  options.allow_shm = allow_shm;
  options.silence_timeout_s = silence_timeout_s;
  options.may_be_cut = may_be_cut;
  for (const auto& [peer, pace] : paces) options.paces[peer] = {pace.first, pace.second};
  const py::gil_scoped_release release;
  return std::make_shared<Endpoint>(std::move(options));
}

void bind_endpoint(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<PyTransfer>(module, "Transfer",
                         "A pending message. Keep it until it was waited for: dropped earlier, it is cancelled.");
  py::class_<Endpoint, std::shared_ptr<Endpoint>>(
      module, "Endpoint",
      "One process's end of all its links. Buffers are contiguous CPU tensors or objects with the buffer protocol. "
      "Raises the classes of elaswave_fx.errors. Do not fork a process that has one.")
      .def(py::init(&make_endpoint), py::arg("rank"), py::arg("token"), py::arg("listen_host") = "127.0.0.1",
           py::arg("port") = 0, py::arg("host_id") = "", py::arg("allow_shm") = true,
           py::arg("silence_timeout_s") = comm::EndpointOptions().silence_timeout_s, py::arg("paces") = PyPaces(),
           py::arg("may_be_cut") = false)
      .def_property_readonly("rank", &Endpoint::rank)
      .def_property_readonly("port", &Endpoint::port)
      .def_property_readonly("host_id", &Endpoint::host_id)
      .def_property_readonly("generation", &Endpoint::generation)
      .def_property_readonly("peers", &Endpoint::peers)
      .def_property_readonly("lost_peers", &Endpoint::lost_peers)
      .def_property_readonly("bytes_sent", &Endpoint::bytes_sent)
      .def_property_readonly("bytes_received", &Endpoint::bytes_received)
      .def_property_readonly("older_frames_rule_consulted", &Endpoint::older_frames_rule_consulted)
      .def("connect", &connect, py::arg("peers"), py::arg("timeout_s"),
           "Opens the missing links to peers, {rank: (host, port, host_id)}, and waits for all of them.")
      .def(
          "mend", [](Endpoint& self, double timeout_s) { self.mend(Deadline::after(timeout_s)); }, py::arg("timeout_s"),
          Released(), "Opens broken links again in the background, for at most so long; both ends have to ask.")
      .def("disconnect", &Endpoint::disconnect, py::arg("peer"), Released())
      .def(
          "link_kind", [](const Endpoint& e, int peer) { return kind_name(e.link_kind(peer)); }, py::arg("peer"),
          "'tcp', 'shm', or 'none' when there is no live link.")
      .def(
          "send",
          [](const std::shared_ptr<Endpoint>& e, int peer, std::uint64_t tag, const py::object& buffer,
             std::optional<std::uint32_t> generation, bool bulk) {
            return post(e, bulk ? comm::Lane::kBulk : comm::Lane::kStep, peer, tag, buffer, generation);
          },
          py::arg("peer"), py::arg("tag"), py::arg("buffer"), py::arg("generation") = py::none(),
          py::arg("bulk") = false, "Bulk messages are overtaken by all others.")
      .def(
          "recv",
          [](const std::shared_ptr<Endpoint>& e, int peer, std::uint64_t tag, const py::object& buffer,
             std::optional<std::uint32_t> generation) { return post(e, std::nullopt, peer, tag, buffer, generation); },
          py::arg("peer"), py::arg("tag"), py::arg("buffer"), py::arg("generation") = py::none())
      .def("wait", &wait_one, py::arg("transfer"), py::arg("timeout_s"))
      .def("wait", &wait_all, py::arg("transfers"), py::arg("timeout_s"),
           "Blocks until all are done; on a failure cancels those that are not, and raises.")
      .def(
          "test", [](Endpoint& e, const PyTransfer& t) { return e.test(t.transfer()); }, py::arg("transfer"),
          Released())
      .def(
          "cancel", [](Endpoint& e, const std::vector<PyTransfer*>& t) { e.cancel(unwrap(t)); }, py::arg("transfers"),
          Released())
      .def("abort", &Endpoint::abort, py::arg("reason"), Released())
      .def("broadcast_abort", &Endpoint::broadcast_abort, py::arg("suspect"), Released(),
           "abort, here and at every peer; suspect None accuses nobody.")
      .def("advance", &Endpoint::advance, py::arg("generation"), Released())
      .def("cut", &Endpoint::cut, py::arg("seconds"), Released(),
           "For so long nothing leaves and nothing arrives, and no link breaks; for tests.")
      .def_property_readonly("is_cut", &Endpoint::is_cut)
      .def("close", &Endpoint::close, Released());
}

void bind_group(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Group>(module, "Group",
                    "An ordered view on some ranks of an endpoint. One thread at a time; after an error it must not be "
                    "used any further.")
      .def(py::init<Endpoint&, std::uint32_t, std::vector<int>, std::uint32_t>(), py::arg("endpoint"), py::arg("id"),
           py::arg("ranks"), py::arg("generation") = 0, py::keep_alive<1, 2>())
      .def_property_readonly("size", &Group::size)
      .def_property_readonly("index", &Group::index)
      .def_property_readonly("ranks", &Group::ranks)
      .def_property_readonly("generation", &Group::generation)
      .def("all_gather", &all_gather, py::arg("tensor"), py::arg("intervals"), py::arg("timeout_s"),
           "Fills every member's interval (lo, hi), in elements, from that member.")
      .def(
          "barrier", [](Group& g, double timeout_s) { g.barrier(Deadline::after(timeout_s)); }, py::arg("timeout_s"),
          Released());
}

}  // namespace

void bind_comm(py::module_& module) {
  py::register_local_exception_translator(&translate);
  bind_endpoint(module);
  bind_group(module);
}

}  // namespace elaswave
