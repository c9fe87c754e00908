#pragma once
// Measures what predictions need of the machine at hand: the kernel's rates as surfaces, how much a
// transfer slows it; the rest is taken from what gyre-info measures anyway.

#include <functional>
#include <string>
#include <vector>

#include "attention/kernels/make_kernel.hpp"
#include "comm/communicator.hpp"
#include "machine/measured.hpp"
#include "predict/machine.hpp"

namespace gyre {

/// What is measured with: `data` is what programs communicate with, of the memory of `stream`.
struct CalibratedBackend {
  Communicator& world;  ///< of host memory
  Communicator& data;
  Stream& stream;
  int threads = 1;  ///< of a rank's kernel
};

/// The model of the machine: kernels in f32 and bf16 of these head dimensions, all ranks at once,
/// mean over ranks; what a decoder does beside attention, in f32; links and copies from `measured`,
/// of all ranks at once. `name`: of the machine. Collective; complete on rank 0. Takes some 2
/// GFLOP a rank for each element of a head.
MachineModel calibrate(const CalibratedBackend& backend, const MeasuredMachine& measured,
                       const std::vector<int>& head_dims, const std::string& name);

/// Seconds of a call while all ranks call: the median of samples of many calls, the mean over
/// ranks. Collective.
double seconds_of_call(const CalibratedBackend& backend, const std::function<void()>& call);

/// What a decoder does beside attention; see calibrate().
DecoderModel calibrate_decoder(const CalibratedBackend& backend);

}  // namespace gyre
