#pragma once
// Measures what predictions need to know about this machine: kernel rates as surfaces, and the
// slowdown by transfers. Everything else comes from the measurements of gyre-info.

#include <functional>
#include <string>
#include <vector>

#include "attention/kernels/make_kernel.hpp"
#include "comm/communicator.hpp"
#include "machine/measured.hpp"
#include "predict/machine.hpp"

namespace gyre {

/// Backend to measure. Programs use `data` for arrays in the memory of `stream`.
struct CalibratedBackend {
  Communicator& world;  ///< in host memory
  Communicator& data;
  Stream& stream;
  int threads = 1;  ///< of each rank's kernel
};

/// Model of this machine. All ranks measure at once: kernels in f32 and bf16 for these head
/// dimensions (mean over ranks); kernels of recurrences, which are for CPUs alone, with states of
/// 64 x 64; the other operations of a decoder in f32. Links and copies
/// come from `measured`. `name` is the machine's. Collective; complete on rank 0. Costs at least 20
/// GFLOP per rank for each element of a head dimension.
MachineModel calibrate(const CalibratedBackend& backend, const MeasuredMachine& measured,
                       const std::vector<int>& head_dims, const std::string& name);

/// Seconds per call while all ranks call: median over samples of many calls, mean over ranks.
/// Collective.
double seconds_of_call(const CalibratedBackend& backend, const std::function<void()>& call);

/// Measures kernels of recurrences; see calibrate().
RecurrenceModel calibrate_recurrences(const CalibratedBackend& backend);

/// Measures the decoder's operations other than attention; see calibrate().
DecoderModel calibrate_decoder(const CalibratedBackend& backend);

}  // namespace gyre
