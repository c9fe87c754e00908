#include "apps/common/network_options.hpp"

#include "comm/agree.hpp"
#include "comm/emulated.hpp"

namespace gyre {

void declare_network(OptionTable& table, std::string& network) {
  AddOptions(table, "Advanced")(
      "--emulate-network", "Delay messages as a slower link would: alpha=10us,beta=5G[,node=4]",
      network)
      .called("network")
      .empty_is("none");
}

void check_network(const std::string& network, const BackendOptions& backend,
                   ConfigErrors& errors) {
  if (network.empty()) return;
  if (backend.on_gpu())
    errors.add("--emulate-network delays messages of CPUs: --backend cpu, or without it");
  try {
    parse_network_model(network);
  } catch (const Error& error) {
    errors.add("{}", error.what());
  }
}

std::unique_ptr<Communicator> make_network(AppContext& context, const std::string& network,
                                           Backend& backend) {
  if (network.empty()) return nullptr;
  NetworkModel model;
  run_agreed(context.world, "--emulate-network", [&] { model = parse_network_model(network); });
  return emulate_network(backend.world(), model);
}

std::string network_reason(const std::string& network) {
  return "emulated network " + network;
}

}  // namespace gyre
