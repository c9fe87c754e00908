#pragma once
// Streams, events and graphs inside of the software GPU. For streams.cpp and graphs.cpp.

#include <deque>
#include <memory>
#include <vector>

#include "softgpu.hpp"

struct CUstream_st {
  std::deque<softgpu::Task> queue;
  int64_t submitted = 0, done = 0;
  int network_tasks = 0;
  bool follows_default = false;
  std::shared_ptr<softgpu::Graph> recorder;  ///< while its work is recorded
  int last = -1;                             ///< its latest node there
};
struct CUevent_st {
  std::shared_ptr<softgpu::Record> latest;
  bool timed = true;
  std::shared_ptr<softgpu::Graph> graph;  ///< where it is a node, if it was recorded last there
  int node = -1;
};

namespace softgpu {

CUstream_st& resolve(cudaStream_t stream);
/// All streams, the default stream and those of graphs among them.
std::vector<CUstream_st*>& streams();
void push(CUstream_st& stream, Task task);
std::shared_ptr<Record> record(CUstream_st& stream);
/// Work of the stream from now on comes after the record.
void hold(CUstream_st& stream, std::shared_ptr<Record> mark);
void record_event(cudaEvent_t event, CUstream_st& stream);
/// Of the host: a launch, a copy, a record, a wait of a stream, an NCCL operation, a graph.
void count_submission();

// ---- graphs.cpp

/// What a graph does at one place, in the queue of one of the streams that were recorded.
struct Node {
  std::function<Task()> make;   ///< the work of a launch; none: an event or an order alone
  cudaEvent_t event = nullptr;  ///< recorded by each launch
  int queue = 0;
  int before = -1;  ///< the node before it in its queue
  int after = -1;   ///< a node of another queue behind which it comes
};
struct Graph {
  std::vector<Node> nodes;
  std::vector<CUstream_st*> recorded;  ///< streams, the one of cudaStreamBeginCapture first
  cudaError_t broken = cudaSuccess;    ///< a call that may not be recorded
};

/// Appends work of a stream that is being recorded.
void add_work(CUstream_st& stream, std::function<Task()> make);

}  // namespace softgpu
