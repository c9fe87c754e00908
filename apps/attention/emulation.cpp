#include "apps/attention/emulation.hpp"

#include <algorithm>

#include "attention/kernels/emulated.hpp"
#include "attention/kernels/make_kernel.hpp"
#include "comm/agree.hpp"
#include "comm/emulated.hpp"
#include "harness/host.hpp"
#include "predict/machine_file.hpp"
#include "report/machine_report.hpp"

namespace gyre {
namespace {

/// Pause between two polls of a sleeping rank. Measured: waking up for a poll takes some 15 us of a
/// core. With shorter pauses, polling ranks delay those that have work; with longer ones, messages
/// are found late.
double seconds_between_polls(const AppContext& context) {
  return std::max(50e-6, 12.5e-6 * ranks_per_core(context));
}

/// The kernel's time, from a rate or from the model in a machine file. Collective.
KernelTime kernel_time_of(Communicator& world, const AttentionOptions& o) {
  if (!names_machine(o.compute)) return parse_kernel_time(o.compute);
  std::string text;
  run_on_root(world, "--emulate-compute", [&] { text = read_machine_text(o.compute); });
  text = broadcast_string(world, text, 0);
  std::shared_ptr<const MachineModel> machine;
  const DType type = o.types().activations;
  run_agreed(world, "--emulate-compute", [&] {
    machine = std::make_shared<MachineModel>(parse_machine_model(o.compute, text));
    for (const Pass pass : {Pass::forward, Pass::backward})
      if (const std::string why = machine->kernel.why_not(pass, type); !why.empty())
        throw_usage("{}: {}", o.compute, why);
  });
  return [machine, type](const KernelCall& call) {
    const BlockHeads& heads = call.input.heads;
    const ModelledCall modelled{
        call.pass, type,      heads.heads, heads.head_dim, call.input.rectangles,
        call.d_q,  call.d_kv, call.merged};
    return call.input.rectangles.empty() ? 0 : machine->kernel.time(modelled).seconds;
  };
}

}  // namespace

NetworkAndKernel make_network_and_kernel(AppContext& context, const AttentionOptions& o,
                                         Backend& backend) {
  std::unique_ptr<Communicator> emulated;
  if (!o.network.empty()) {
    NetworkModel model;
    run_agreed(context.world, "--emulate-network", [&] { model = parse_network_model(o.network); });
    emulated = emulate_network(backend.world(), model);
  }
  Communicator& network = emulated ? *emulated : backend.world();
  const KernelTime time = o.emulates_compute() ? kernel_time_of(context.world, o) : KernelTime();
  std::unique_ptr<BlockKernel> kernel;
  run_agreed(context.world, "--kernel", [&] {
    if (!o.emulates_compute()) {
      kernel = make_block_kernel(backend.stream(),
                                 {o.kernel, o.types().activations, o.threads, o.deterministic});
      return;
    }
    const double pause = seconds_between_polls(context);
    for (Communicator* waits : {&network, &context.world}) waits->sleep_between_polls(pause);
    kernel =
        make_emulated_kernel(time, {pause, [&network] { return network.next_event(); }, {}, {}});
  });
  return {std::move(emulated), network, std::move(kernel)};
}

}  // namespace gyre
