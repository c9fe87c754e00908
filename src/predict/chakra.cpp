#include "predict/chakra.hpp"

#include <cmath>
#include <string_view>

#include "predict/task_graph.hpp"

namespace gyre {
namespace {

/// A message in the wire format of protocol buffers, https://protobuf.dev/programming-guides/encoding
class ProtoMessage {
 public:
  void number(uint32_t field, uint64_t value) {
    varint(field << 3U);
    varint(value);
  }
  void text(uint32_t field, std::string_view value) {
    varint(field << 3U | 2U);
    sized(value);
  }
  /// Behind its length.
  void sized(std::string_view value) {
    varint(value.size());
    bytes_ += value;
  }
  void varint(uint64_t value) {
    for (; value >= 0x80U; value >>= 7U) bytes_ += static_cast<char>(0x80U | (value & 0x7FU));
    bytes_ += static_cast<char>(value);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Fields and values of et_def.proto.
namespace of_metadata {
constexpr uint32_t version = 1;
}
namespace of_node {
constexpr uint32_t id = 1, name = 2, type = 3, data_deps = 5, duration_micros = 7, attr = 10;
}
namespace of_attribute {
constexpr uint32_t name = 1, int32_val = 7, int64_val = 9, bool_val = 27;
}
enum class NodeType { compute = 4, send = 5, receive = 6 };

void add_attribute(ProtoMessage& node, std::string_view name, uint32_t field, int64_t value) {
  ProtoMessage attribute;
  attribute.text(of_attribute::name, name);
  attribute.number(field, static_cast<uint64_t>(value));
  node.text(of_node::attr, attribute.bytes());
}

void add_message(ProtoMessage& node, const Task& task, int rank) {
  const bool sends = task.kind == Task::Kind::send;
  add_attribute(node, "comm_src", of_attribute::int32_val, sends ? rank : task.peer);
  add_attribute(node, "comm_dst", of_attribute::int32_val, sends ? task.peer : rank);
  add_attribute(node, "comm_size", of_attribute::int64_val, task.bytes);
  add_attribute(node, "comm_tag", of_attribute::int32_val, task.tag);
}

}  // namespace

std::string chakra_trace(const std::vector<Programs>& passes, int rank) {
  ProtoMessage trace, metadata;
  metadata.text(of_metadata::version, "0.0.4");
  trace.sized(metadata.bytes());
  uint64_t id = 0;
  double rest = 0;  // microseconds that rounding has left
  for (const Task& task : tasks_of(passes, rank, "an execution trace")) {
    ProtoMessage node, required;
    const bool computes = task.kind == Task::Kind::compute, sends = task.kind == Task::Kind::send;
    node.number(of_node::id, ++id);
    node.text(of_node::name, computes ? "compute" : sends ? "send" : "receive");
    const NodeType type = computes ? NodeType::compute : sends ? NodeType::send : NodeType::receive;
    node.number(of_node::type, static_cast<uint64_t>(type));
    for (const int64_t label : task.required) required.varint(static_cast<uint64_t>(label));
    if (!task.required.empty()) node.text(of_node::data_deps, required.bytes());
    if (computes) {
      rest += 1e6 * task.seconds;
      const double whole = std::round(rest);
      rest -= whole;
      node.number(of_node::duration_micros, static_cast<uint64_t>(whole));
    }
    add_attribute(node, "is_cpu_op", of_attribute::bool_val, 0);
    if (!computes) add_message(node, task, rank);
    trace.sized(node.bytes());
  }
  return trace.bytes();
}

}  // namespace gyre
