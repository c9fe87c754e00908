// Streams and events of the software GPU. A stream is a queue, and its work is done as late as CUDA
// allows: when the host waits for it, or for something behind it. What a program forgets to wait
// for is thus not there.

#include "streams.hpp"

#include <sched.h>

#include <chrono>
#include <utility>

namespace softgpu {
namespace {

CUstream_st& default_stream() {
  static auto& stream = *new CUstream_st;
  return stream;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Does one piece of work that the front of the stream needs. False: there is none, or it waits for
/// another process.
bool advance(CUstream_st& stream) {
  if (stream.queue.empty()) return false;
  Task& front = stream.queue.front();
  if (front.after && !front.after->reached) return advance(*front.after->stream);
  const Step step = front.step();
  if (step == Step::done) {
    stream.network_tasks -= front.network;
    stream.queue.pop_front();
    ++stream.done;
  }
  return step != Step::waits;
}

/// The default stream and the streams that are not cudaStreamNonBlocking wait for each other.
void order_with_default(CUstream_st& stream) {
  if (&stream == &default_stream()) {
    for (CUstream_st* other : streams())
      if (other->follows_default && !other->queue.empty()) hold(stream, record(*other));
  } else if (stream.follows_default && !default_stream().queue.empty()) {
    hold(stream, record(default_stream()));
  }
}

void finish(CUstream_st& stream) {
  const int64_t target = stream.submitted;
  while (stream.done < target)
    if (!advance(stream)) {
      progress();
      sched_yield();
    }
}

}  // namespace

CUstream_st& resolve(cudaStream_t stream) {
  return stream == nullptr ? default_stream() : *stream;
}
std::vector<CUstream_st*>& streams() {
  static auto& all = *new std::vector<CUstream_st*>{&default_stream()};
  return all;
}
void push(CUstream_st& stream, Task task) {
  stream.network_tasks += task.network;
  ++stream.submitted;
  stream.queue.push_back(std::move(task));
}
std::shared_ptr<Record> record(CUstream_st& stream) {
  auto mark = std::make_shared<Record>();
  mark->stream = &stream;
  push(stream, {[mark] {
                  mark->seconds = now();
                  mark->reached = true;
                  return Step::done;
                },
                nullptr,
                false,
                {}});
  return mark;
}
void hold(CUstream_st& stream, std::shared_ptr<Record> mark) {
  push(stream, {[] { return Step::done; }, std::move(mark), false, {}});
}

void progress() {
  for (CUstream_st* stream : streams())
    if (stream->network_tasks > 0) {
      const DeviceAccess access;
      advance(*stream);
    }
}

void submit_made(cudaStream_t stream, std::function<Task()> make) {
  count_submission();
  CUstream_st& queue = resolve(stream);
  if (queue.recorder) return add_work(queue, std::move(make));
  order_with_default(queue);
  push(queue, make());
}
void submit(cudaStream_t stream, Task task) {
  submit_made(stream, [task = std::move(task)] { return task; });
}
void submit(cudaStream_t stream, std::function<void()> run) {
  submit(stream, Task{[run = std::move(run)] {
                        run();
                        return Step::done;
                      },
                      nullptr,
                      false,
                      {}});
}

void finish(cudaStream_t stream) {
  const DeviceAccess access;
  order_with_default(resolve(stream));
  finish(resolve(stream));
}
void finish_all() {
  const DeviceAccess access;
  for (CUstream_st* stream : streams()) finish(*stream);
}
void run_until(const std::function<bool()>& done) {
  while (!done()) {
    progress();
    sched_yield();
  }
}

bool in_use(const void* begin, const void* end) {
  for (const CUstream_st* stream : streams())
    for (const Task& task : stream->queue)
      for (const void* host : task.host)
        if (begin <= host && host < end) return true;
  return false;
}

}  // namespace softgpu

using softgpu::note;

namespace {
int64_t waits = 0, submissions = 0;
}  // namespace

int64_t softgpu::host_waits() {
  return waits;
}
int64_t softgpu::host_submissions() {
  return submissions;
}
void softgpu::count_submission() {
  ++submissions;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (softgpu::devices() == 0) return note(cudaErrorNoDevice);
  *stream = new CUstream_st;
  (*stream)->follows_default = flags == cudaStreamDefault;
  softgpu::streams().push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr) return note(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = softgpu::refuse_in_recorded(stream)) return error;
  softgpu::finish(stream);
  std::erase(softgpu::streams(), stream);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++waits;
  if (softgpu::in_nccl_group()) softgpu::die("cudaStreamSynchronize inside of an NCCL group");
  if (const cudaError_t error = softgpu::refuse_while_recording()) return error;
  softgpu::finish(stream);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ++waits;
  if (softgpu::devices() == 0) return note(cudaErrorNoDevice);
  if (const cudaError_t error = softgpu::refuse_while_recording()) return error;
  softgpu::finish_all();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t error = softgpu::refuse_while_recording()) return error;
  CUstream_st& queried = softgpu::resolve(stream);
  if (queried.queue.empty()) return cudaSuccess;
  const softgpu::DeviceAccess access;
  if (!softgpu::advance(queried)) softgpu::progress();
  return note(cudaErrorNotReady);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (softgpu::devices() == 0) return note(cudaErrorNoDevice);
  *event = new CUevent_st;
  (*event)->timed = (flags & cudaEventDisableTiming) == 0;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
void softgpu::record_event(cudaEvent_t event, CUstream_st& stream) {
  order_with_default(stream);
  event->latest = record(stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event->graph) return note(cudaErrorCapturedEvent);
  if (const cudaError_t error = softgpu::refuse_while_recording()) return error;
  if (!event->latest || event->latest->reached) return cudaSuccess;
  const softgpu::DeviceAccess access;
  if (!softgpu::advance(*event->latest->stream)) softgpu::progress();
  return note(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ++waits;
  if (event->graph) return note(cudaErrorCapturedEvent);
  if (const cudaError_t error = softgpu::refuse_while_recording()) return error;
  const softgpu::DeviceAccess access;
  while (event->latest && !event->latest->reached)
    if (!softgpu::advance(*event->latest->stream)) {
      softgpu::progress();
      sched_yield();
    }
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  if (begin->graph || end->graph) return note(cudaErrorCapturedEvent);
  if (!begin->latest || !end->latest || !begin->timed || !end->timed)
    return note(cudaErrorInvalidResourceHandle);
  if (!begin->latest->reached || !end->latest->reached) return note(cudaErrorNotReady);
  *milliseconds = static_cast<float>(1e3 * (end->latest->seconds - begin->latest->seconds));
  return cudaSuccess;
}
