// Streams whose work is recorded into a graph, and launches of graphs.
//
// Recording follows the work: a stream that waits for an event of a recorded stream is recorded
// from then on, too. In a launch each recorded stream has a queue of its own, so that what was in
// two streams is as little ordered as CUDA leaves it:
//
//     stream      before | launch ------------------------ | after
//     queue 0              q | record  | k  | wait 1 | k
//     queue 1                   wait 0 | send | record

#include <algorithm>
#include <utility>

#include "streams.hpp"

struct CUgraph_st {
  std::shared_ptr<softgpu::Graph> graph;
};
struct CUgraphExec_st {
  std::shared_ptr<softgpu::Graph> graph;
  std::vector<std::unique_ptr<CUstream_st>> queues;
  std::shared_ptr<softgpu::Record> end;  // of the latest launch
};

namespace softgpu {
namespace {

std::shared_ptr<Graph>& open_recording() {
  static auto& open = *new std::shared_ptr<Graph>;
  return open;
}

int queue_of(const Graph& graph, const CUstream_st& stream) {
  const auto found = std::find(graph.recorded.begin(), graph.recorded.end(), &stream);
  return static_cast<int>(found - graph.recorded.begin());
}

void add_node(CUstream_st& stream, Node node) {
  Graph& graph = *stream.recorder;
  node.queue = queue_of(graph, stream);
  node.before = stream.last;
  stream.last = static_cast<int>(graph.nodes.size());
  graph.nodes.push_back(std::move(node));
}

void start_recording(CUstream_st& stream, const std::shared_ptr<Graph>& graph) {
  stream.recorder = graph;
  stream.last = -1;
  graph->recorded.push_back(&stream);
}

/// Whether the last node of the first stream comes behind all others.
bool is_joined(const Graph& graph, int last) {
  std::vector<char> reached(graph.nodes.size(), 0);
  std::vector<int> open{last};
  while (!open.empty()) {
    const int at = open.back();
    open.pop_back();
    if (at < 0 || std::exchange(reached[static_cast<size_t>(at)], 1) != 0) continue;
    open.push_back(graph.nodes[static_cast<size_t>(at)].before);
    open.push_back(graph.nodes[static_cast<size_t>(at)].after);
  }
  return std::all_of(reached.begin(), reached.end(), [](char is) { return is != 0; });
}

cudaError_t refuse(Graph* graph, cudaError_t error) {
  if (graph == nullptr) return cudaSuccess;
  if (graph->broken == cudaSuccess) graph->broken = error;
  return note(error);
}

}  // namespace

void add_work(CUstream_st& stream, std::function<Task()> make) {
  Node node;
  node.make = std::move(make);
  add_node(stream, std::move(node));
}
bool is_recorded(cudaStream_t stream) {
  return resolve(stream).recorder != nullptr;
}
cudaError_t refuse_while_recording() {
  return refuse(open_recording().get(), cudaErrorStreamCaptureUnsupported);
}
cudaError_t refuse_in_recorded(cudaStream_t stream) {
  return refuse(resolve(stream).recorder.get(), cudaErrorStreamCaptureUnsupported);
}

}  // namespace softgpu

using softgpu::note;

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  softgpu::count_submission();
  CUstream_st& queue = softgpu::resolve(stream);
  event->graph.reset();
  if (!queue.recorder) {
    softgpu::record_event(event, queue);
    return cudaSuccess;
  }
  softgpu::Node node;
  if (flags == cudaEventRecordExternal) node.event = event;
  softgpu::add_node(queue, std::move(node));
  if (flags == cudaEventRecordExternal) return cudaSuccess;
  event->graph = queue.recorder;
  event->node = queue.last;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  softgpu::count_submission();
  CUstream_st& waiting = softgpu::resolve(stream);
  if (event->graph) {
    if (event->graph->recorded.empty()) return note(cudaErrorCapturedEvent);  // no longer recorded
    if (!waiting.recorder) softgpu::start_recording(waiting, event->graph);
    if (waiting.recorder != event->graph)
      return softgpu::refuse(waiting.recorder.get(), cudaErrorStreamCaptureMerge);
    softgpu::Node node;
    node.after = event->node;
    softgpu::add_node(waiting, std::move(node));
    return cudaSuccess;
  }
  if (waiting.recorder)  // for what no launch of the graph would do
    return softgpu::refuse(waiting.recorder.get(), cudaErrorStreamCaptureIsolation);
  if (event->latest && !event->latest->reached) softgpu::hold(waiting, event->latest);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (softgpu::devices() == 0) return note(cudaErrorNoDevice);
  if (stream == nullptr || softgpu::open_recording())
    return note(cudaErrorStreamCaptureUnsupported);
  softgpu::open_recording() = std::make_shared<softgpu::Graph>();
  softgpu::start_recording(*stream, softgpu::open_recording());
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (stream == nullptr || !stream->recorder || stream->recorder->recorded.front() != stream)
    return note(cudaErrorStreamCaptureUnmatched);
  const std::shared_ptr<softgpu::Graph> recorded = std::move(softgpu::open_recording());
  softgpu::open_recording().reset();
  const int last = stream->last;
  for (CUstream_st* one : std::exchange(recorded->recorded, {})) one->recorder.reset();
  if (recorded->broken != cudaSuccess) return note(cudaErrorStreamCaptureInvalidated);
  if (!softgpu::is_joined(*recorded, last)) return note(cudaErrorStreamCaptureUnjoined);
  *graph = new CUgraph_st{recorded};
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st;
  (*exec)->graph = graph->graph;
  int queues = 1;
  for (const softgpu::Node& node : graph->graph->nodes) queues = std::max(queues, node.queue + 1);
  for (int i = 0; i < queues; ++i) {
    (*exec)->queues.push_back(std::make_unique<CUstream_st>());
    softgpu::streams().push_back((*exec)->queues.back().get());
  }
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (const cudaError_t error = softgpu::refuse_in_recorded(stream)) return error;
  softgpu::count_submission();
  CUstream_st& caller = softgpu::resolve(stream);
  const std::shared_ptr<softgpu::Record> begin = softgpu::record(caller);
  for (const auto& queue : exec->queues) {
    softgpu::hold(*queue, begin);
    if (exec->end) softgpu::hold(*queue, exec->end);  // launches of one graph follow each other
  }
  const std::vector<softgpu::Node>& nodes = exec->graph->nodes;
  std::vector<char> awaited(nodes.size(), 0);
  for (const softgpu::Node& node : nodes)
    if (node.after >= 0) awaited[static_cast<size_t>(node.after)] = 1;
  std::vector<std::shared_ptr<softgpu::Record>> reached(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    const softgpu::Node& node = nodes[i];
    CUstream_st& queue = *exec->queues[static_cast<size_t>(node.queue)];
    if (node.after >= 0) softgpu::hold(queue, reached[static_cast<size_t>(node.after)]);
    if (node.make) softgpu::push(queue, node.make());
    if (node.event != nullptr) softgpu::record_event(node.event, queue);
    if (awaited[i] != 0) reached[i] = softgpu::record(queue);
  }
  exec->end = softgpu::record(*exec->queues.front());
  softgpu::hold(caller, exec->end);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes != nullptr) return note(cudaErrorInvalidValue);  // nodes have no handles here
  *count = static_cast<size_t>(
      std::count_if(graph->graph->nodes.begin(), graph->graph->nodes.end(),
                    [](const softgpu::Node& node) { return node.make || node.event != nullptr; }));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
/// A launch under way goes on, as with CUDA; here, to its end.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  if (const cudaError_t error = softgpu::refuse_while_recording()) return error;
  for (const auto& queue : exec->queues) softgpu::finish(queue.get());
  for (const auto& queue : exec->queues) std::erase(softgpu::streams(), queue.get());
  delete exec;
  return cudaSuccess;
}
