#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "errors.hpp"
#include "machine/identity.hpp"
#include "machine/json.hpp"
#include "machine/system_files.hpp"
#include "mpi_test.hpp"
#include "report/machine_report.hpp"
#include "report/result.hpp"
#include "runtime/mpi_transport.hpp"

namespace gyre {
namespace GYRE_FILE {

using Json = nlohmann::ordered_json;

HostIdentity sample_host(const std::string& name) {
  HostIdentity host;
  host.host = name;
  host.cpu = "AMD EPYC";
  host.sockets = 1;
  host.cores = host.threads = 2;
  host.numa = {{0, "0-1", int64_t{24} << 30}};
  host.memory_bytes = (int64_t{24} << 30) - (int64_t{100} << 20);
  return host;
}

MachineReport sample_machine() {
  MachineReport machine;
  machine.identity.hosts = {sample_host("n1")};
  machine.identity.ranks = {{0, "n1", "0", "0"}, {1, "n1", "0-1", ""}};
  machine.identity.mpi = {
      "MPICH 4.0.2", "ch4:ucx", "UCX 1.13.1", {"sysv/memory", "cma/memory"}, {}};
  return machine;
}

MeasuredMachine sample_measurements() {
  MeasuredMachine measured;
  measured.time = "2026-01-31T12:00:00Z";
  measured.backend = "cpu";
  measured.comm = "mpi";
  measured.ranks = measured.ranks_of_a_host = 2;
  measured.window_seconds = 0.1;
  measured.cores_used_by_others = 0.25;
  measured.rates.how = "in a window";
  measured.rates.array_bytes = 1 << 27;
  measured.rates.one_core_fma = {1.0 / 3.0, {0.25, 1.0 / 3.0}};
  measured.rates.one_rank.read = {2e10, {2e10}};
  MeasuredLink link{{0, 1}, 5e-7, 1e10, {{8, {5e-7, {4e-7, 5e-7, 6e-7}}}}};
  measured.messages = {"ping-pong", link, std::nullopt, link};
  return measured;
}

/// What gyre-info writes, as far as it is read.
Json sample_document() {
  Json document = {{"schema", machine_schema}};
  document.update(json_of(sample_machine().identity));
  document["measured"] = json_of(sample_measurements(), true);
  return document;
}

MachineFile parsed(const Json& document) {
  return parse_machine_file("some/machine.json", document.dump());
}

TEST(MachineCpus, ListsAreReadAndCompared) {
  EXPECT_EQ(parse_cpu_list("0-2,8"), (std::vector<int>{0, 1, 2, 8}));
  EXPECT_EQ(parse_cpu_list("5"), std::vector<int>{5});
  EXPECT_TRUE(parse_cpu_list("").empty());
  for (const char* bad : {"a", "1-", "-1", "1;2", "1,,2", "99999999999"})
    EXPECT_THROW(parse_cpu_list(bad), Error) << bad;
  const std::vector<NumaNode> nodes = {{0, "0-3", 0}, {1, "4-7", 0}, {2, "", 0}};
  EXPECT_EQ(numa_of("0-1", nodes), "0");
  EXPECT_EQ(numa_of("3-4", nodes), "0,1");
  EXPECT_EQ(numa_of("9", nodes), "");
}

TEST(MachineFiles, ValuesAreFound) {
  const std::string text = "MemTotal:       24684092 kB\nMemFree: 1 kB\nNAME=\"a b\"\nplain\n";
  EXPECT_EQ(value_in(text, "MemTotal"), "24684092 kB");
  EXPECT_EQ(value_in(text, "NAME"), "a b");
  EXPECT_EQ(value_in(text, "Mem"), "");
  EXPECT_EQ(chosen_in("always [madvise] never"), "madvise");
  EXPECT_EQ(chosen_in("none ] chosen ["), "");
  EXPECT_EQ(joined_kinds({"performance", "", "powersave", "performance"}), "performance+powersave");
  EXPECT_EQ(read_small_file("/no/such/file"), "");
}

TEST(MachineTransport, MpichNamesItsDevice) {
  EXPECT_EQ(mpich_device("MPICH Version:\t4.0.2\nMPICH Device:    \tch4:ucx\nMPICH CC:\tgcc\n"),
            "ch4:ucx");
  EXPECT_EQ(mpich_device("Open MPI v4.1.4, package: Debian OpenMPI"), "");
}

TEST(MachineTransport, LanesOfAnEndpoint) {
  const UcxLanes memory = parse_lanes(
      "#\n# UCP endpoint \n#\n#               peer: <no debug data>\n"
      "#  lane[0]:  3:sysv/memory.0 md[2]       -> md[2]/sysv/sysdev[255] am am_bw#0\n"
      "#  lane[1]:  4:posix/memory.0 md[3]      -> md[3]/posix/sysdev[255]\n"
      "#  lane[2]:  5:cma/memory.0 md[4]        -> md[4]/cma/sysdev[255] rma_bw#0\n"
      "#      tag_send: 0..<egr/short>..93..<egr/bcopy>..8256..<rndv>..(inf)\n");
  EXPECT_EQ(memory.small, "sysv/memory");
  EXPECT_EQ(memory.large, "cma/memory");
  const UcxLanes network = parse_lanes(
      "#  lane[0]:  0:tcp/lo.0 md[0]    -> md[0]/tcp/sysdev[255] rma_bw#0 am am_bw#0\n"
      "#  lane[1]:  1:tcp/eth0.0 md[0]  -> md[0]/tcp/sysdev[255] rma_bw#1 wireup\n");
  EXPECT_EQ(network.small, "tcp/lo");
  EXPECT_EQ(network.large, "tcp/lo+tcp/eth0");
  const UcxLanes pieces =
      parse_lanes("#  lane[0]:  0:posix/memory.0 md[0]  -> md[0]/posix/sysdev[255] am am_bw#0\n");
  EXPECT_EQ(pieces.large, "posix/memory") << "without a lane for remote memory";
  EXPECT_EQ(parse_lanes("another version says it otherwise").small, "");
}

TEST(MachineSamples, BestAndMedian) {
  EXPECT_EQ(best_of({3, 1, 2}).value, 3);
  EXPECT_EQ(median_of({3, 1, 2}).value, 2);
  EXPECT_EQ(median_of({4, 1, 2, 3}).value, 2.5);
  EXPECT_EQ(median_of({3, 1, 2}).samples, (std::vector<double>{3, 1, 2})) << "in their order";
  EXPECT_EQ(best_of({}).value, 0);
  EXPECT_EQ(median_of({}).value, 0);
}

TEST(MachineHost, TopologyIsCounted) {
  const char* components = getenv("HWLOC_COMPONENTS");  // which would keep the real machine
  const std::string before = components == nullptr ? "" : components;
  unsetenv("HWLOC_COMPONENTS");
  setenv("HWLOC_SYNTHETIC", "pack:2 numa:2 l3:1 core:4 pu:2", 1);
  const HostIdentity host = find_host();
  unsetenv("HWLOC_SYNTHETIC");
  if (components != nullptr) setenv("HWLOC_COMPONENTS", before.c_str(), 1);
  EXPECT_EQ(host.sockets, 2);
  EXPECT_EQ(host.cores, 16);
  EXPECT_EQ(host.threads, 32);
  ASSERT_EQ(host.numa.size(), 4U);
  EXPECT_EQ(host.numa[1].cpus, "8-15");
  const auto l3 = std::ranges::find(host.caches, "L3", &CacheKind::name);
  ASSERT_NE(l3, host.caches.end());
  EXPECT_EQ(l3->count, 4);
}

TEST(MachineHost, ThisOneIsKnown) {
  const HostIdentity host = find_host();
  EXPECT_FALSE(host.host.empty());
  EXPECT_GE(host.sockets, 1);
  EXPECT_GE(host.cores, host.sockets);
  EXPECT_GE(host.threads, host.cores);
  EXPECT_GT(host.memory_bytes, 0);
  EXPECT_NE(host.kernel.find("Linux"), std::string::npos);
  EXPECT_FALSE(host.simd.empty());
}

TEST(MachineHosts, DifferInKind) {
  std::vector<HostIdentity> hosts = {sample_host("n1"), sample_host("n2"), sample_host("n3")};
  hosts[1].memory_bytes -= 4096;
  hosts[1].numa[0].memory_bytes -= 4096;
  hosts[2].governor = "powersave";
  const auto kinds = kinds_of_hosts(hosts);
  ASSERT_EQ(kinds.size(), 2U);
  EXPECT_EQ(kinds[0], (std::vector<const HostIdentity*>{&hosts[0], &hosts[1]}));
  hosts[1].memory_bytes /= 2;
  EXPECT_EQ(kinds_of_hosts(hosts).size(), 3U);
  MachineReport machine;
  machine.identity.hosts = hosts;
  const Json json = machine_json(machine);
  ASSERT_EQ(json.at("hosts").size(), 3U);
  EXPECT_EQ(json.at("hosts")[2].at("names"), Json({"n3"}));
}

TEST(MachineLine, NamesTheKindOfHost) {
  MachineReport machine = sample_machine();
  EXPECT_EQ(machine_text(machine),
            "# machine AMD EPYC, 1 socket, 2 cores, 1 NUMA node, 24 GiB, governor n/a\n");
  EXPECT_EQ(machine_text({}), "");
  HostIdentity& host = machine.identity.hosts[0];
  host.governor = "performance";
  host.sockets = 2;
  host.gpus = {"NVIDIA H200", "NVIDIA H200"};
  machine.identity.hosts.push_back(host);
  machine.identity.hosts.push_back(sample_host("n3"));
  EXPECT_EQ(machine_text(machine),
            "# machine 2 x AMD EPYC, 2 sockets, 2 cores, 1 NUMA node, 24 GiB, governor "
            "performance, 2 x NVIDIA H200; 1 other host\n");
}

TEST(MachineLine, HasAtMost120Columns) {
  for (const int length : {20, 60, 200}) {
    MachineReport machine = sample_machine();
    HostIdentity& host = machine.identity.hosts[0];
    host.cpu = std::string(static_cast<size_t>(length), 'x');
    EXPECT_LE(machine_text(machine).size(), 121U) << length;
    EXPECT_NE(machine_text(machine).find("governor n/a\n"), std::string::npos);
    host.gpus.assign(8, std::string(static_cast<size_t>(length), 'y'));
    EXPECT_LE(machine_text(machine).size(), 121U) << length;
  }
}

TEST(MachineReportJson, NamesPlacesAndWhatWasMeasured) {
  RunReport report;
  report.ranks = {{0, "n1", "cpu"}, {1, "n1", "cpu"}, {2, "n1", "cpu"}};
  EXPECT_TRUE(Json::parse(json_text(report, "now")).at("machine").is_null());
  report.machine = sample_machine();
  Json json = Json::parse(json_text(report, "now"));
  EXPECT_EQ(json.at("ranks")[0].at("cpus"), "0");
  EXPECT_EQ(json.at("ranks")[1].at("cpus"), "0-1");
  EXPECT_TRUE(json.at("ranks")[1].at("numa").is_null()) << "unknown";
  EXPECT_FALSE(json.at("ranks")[2].contains("cpus")) << "not placed";
  const Json& machine = json.at("machine");
  EXPECT_EQ(machine.at("hosts")[0].at("names"), Json({"n1"}));
  EXPECT_TRUE(machine.at("hosts")[0].at("governor").is_null());
  EXPECT_EQ(machine.at("mpi").at("inside_host").at("large"), "cma/memory");
  EXPECT_TRUE(machine.at("slurm").is_null());
  EXPECT_FALSE(machine.contains("measured"));
  auto file = std::make_shared<MachineFile>(parsed(sample_document()));
  file->sha256 = "9f2c";
  report.machine.file = file;
  json = Json::parse(json_text(report, "now"));
  const Json& measured = json.at("machine").at("measured");
  EXPECT_EQ(measured.at("file"), "machine.json");
  EXPECT_EQ(measured.at("sha256"), "9f2c");
  EXPECT_EQ(measured.at("rates").at("one_core_fma_flops_per_s").get<double>(), 1.0 / 3.0);
  EXPECT_FALSE(measured.at("rates").contains("how"));
  EXPECT_TRUE(measured.at("messages").at("between_hosts").is_null());
}

TEST(MachineFileRead, RoundTrips) {
  const MachineFile file = parsed(sample_document());
  EXPECT_EQ(file.path, "some/machine.json");
  EXPECT_EQ(file.measured, sample_measurements());
  EXPECT_EQ(file.hosts, (std::vector<HostKind>{{"AMD EPYC", 1, 2}}));
  Json document = sample_document();
  document["measured"]["gpu"] = {
      {"how", "h"}, {"array_bytes", 1}, {"fill_bytes_per_s", 2.5}, {"copy_bytes_per_s", 3}};
  document["one more"] = "key";
  EXPECT_EQ(parsed(document).measured.gpu->fill, 2.5);
}

/// A usage error whose message holds `part`.
void expect_complaint(const std::string& part, const std::function<void()>& work) {
  const std::string message = test::usage_message(work);
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

/// A change of the document, and what is said about it.
void expect_refusal(const std::string& pointer, const Json& value, const std::string& message) {
  Json document = sample_document();
  const Json::json_pointer place(pointer);
  if (value == "removed")
    document.at(place.parent_pointer()).erase(place.back());
  else
    document[place] = value;
  expect_complaint(message, [&] { parsed(document); });
}

TEST(MachineFileRead, NamesPlaceAndValueOfWhatIsWrong) {
  expect_complaint("some/machine.json: ",
                   [] { parse_machine_file("some/machine.json", "{\"schema\": "); });
  expect_complaint("wanted: JSON, gyre-machine/1, as gyre-info --json writes it",
                   [] { parse_machine_file("some/machine.json", "# machine"); });
  expect_complaint("the file is [1]; wanted: an object with 'schema'",
                   [] { parse_machine_file("some/machine.json", "[1]"); });
  expect_complaint("some/machine.json: more than 32 levels of brackets",
                   [] { parse_machine_file("some/machine.json", std::string(1000000, '[')); });
  expect_refusal("/schema", "gyre-result/1",
                 "some/machine.json: schema is \"gyre-result/1\"; wanted: \"gyre-machine/1\"");
  expect_refusal("/hosts", Json::array(), "hosts is []; wanted: a list of at least one");
  expect_refusal("/hosts/0/cpu", 7, "hosts[0].cpu is 7; wanted: a text or null");
  expect_refusal("/hosts/0/cores", "removed", "hosts[0] has no 'cores'");
  expect_refusal("/measured", nullptr, "measured is null; wanted: what gyre-info --json writes");
  expect_refusal("/measured/rates", "removed", "measured has no 'rates'; nearest: 'ranks'");
  expect_refusal("/measured/ranks", 2.5, "measured.ranks is 2.5; wanted: a whole number");
  expect_refusal("/measured/ranks", 1e300, "measured.ranks is 1e+300; wanted: a whole number");
  expect_refusal("/measured/ranks", 1LL << 40, "measured.ranks is 1099511627776; wanted: a whole");
  expect_refusal("/measured/rates/one_rank/read_bytes_per_s/value", -1,
                 "measured.rates.one_rank.read_bytes_per_s.value is -1; wanted: a number of at "
                 "least 0");
  expect_refusal(
      "/measured/rates/one_rank/copy_bytes_per_s", std::string(99, 'x'),
      "copy_bytes_per_s is \"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...; wanted: an object");
  expect_refusal("/measured/messages/inside_host/messages/0/bytes", true,
                 "measured.messages.inside_host.messages[0].bytes is true; wanted");
}

TEST(MachineFileRead, IsOfTheSameKindOfMachine) {
  const MachineFile file = parsed(sample_document());
  MachineIdentity machine = sample_machine().identity;
  require_same_kind(file, machine);
  machine.hosts.push_back(sample_host("n2"));
  machine.hosts[1].cores = 64;
  expect_complaint(
      "--machine some/machine.json: hosts[0] is AMD EPYC with 1 sockets and 2 cores, but host n2 "
      "of this run is AMD EPYC with 1 and 64",
      [&] { require_same_kind(file, machine); });
}

}  // namespace GYRE_FILE
}  // namespace gyre
