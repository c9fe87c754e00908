// Machine files for predictions: those of inputs/machines, and what is said of files with mistakes.

#include "predict/machine_file.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

const std::string good = R"(schema = "gyre-machine/1"
[model]
name = "a machine"
rank = "a rank"
memory_bytes = { value = 64e9, source = "s" }
copy_bytes_per_s = { value = 2e12, source = "s" }
order_margin = { value = 0.0625, source = "s" }
logprob_row_s = { value = 3e-9, source = "s" }
logprob_bytes_per_s = { value = 1e12, source = "s" }

[[model.links]]
tier = "node"
ranks = 8
latency_s = { value = 1e-6, source = "s" }
message_bytes = [1024, 65536]
bytes_per_s = { value = [1e9, 4e9], source = "s" }
all_at_once = { value = 0.5, source = "s" }
kernel_slowdown = { value = 0.25, source = "s" }

[[model.links]]
tier = "switch"
latency_s = { value = 2e-5, source = "s" }
bytes_per_s = { value = 5e8, source = "s" }

[[model.kernels]]
pass = "fwd"
dtype = "bf16"
head_dim = 128
library = "of its own"
launch_s = { value = 5e-6, source = "s" }
merge_s = { value = 3e-12, source = "s" }
diagonal_s = { value = 1e-10, source = "s" }
rows = [512, 1024]
keys = [256, 512, 1024]
flops_per_s = { value = [[1e12, 2e12, 3e12], [4e12, 5e12, 6e12]], source = "s" }

[[model.kernels]]
pass = "bwd"
dtype = "f32"
head_dim = 64
rows = [512, 1024]
flops_per_s = { value = [7e12, 8e12], source = "s" }

[[model.recurrences]]
kind = "kda"
pass = "bwd"
dtype = "bf16"
library = "a third"
launch_s = { value = 4e-6, source = "s" }
scan_s = { value = 6e-9, source = "s" }
flops_per_s = { value = 9e12, source = "s" }
summary_flops_per_s = { value = 3e12, source = "s" }

[[model.recurrences]]
kind = "gdn"
pass = "fwd"
dtype = "f32"
flops_per_s = { value = 8e12, source = "s" }

[[model.linears]]
dtype = "bf16"
library = "another"
launch_s = { value = 2e-6, source = "s" }
rows = [64, 128]
columns = [32, 2048]
flops_per_s = { value = [[1e11, 2e11], [3e11, 4e11]], source = "s" }

[[model.all_reduces]]
ranks = 4
message_bytes = [2000, 6000]
seconds = { value = [1e-5, 3e-5], source = "s" }

[[model.errors]]
pass = "fwd"
ranks = "one"
share = { value = 0.15, source = "s" }

[[model.errors]]
pass = "fwd"
ranks = "several"
share = { value = 0.35, source = "s" }
)";

TEST(MachineFile, IsReadWhole) {
  const MachineModel m = parse_machine_model("m.toml", good);
  EXPECT_EQ(m.name, "a machine");
  EXPECT_EQ(m.memory_bytes, 64e9);
  EXPECT_EQ(m.copy_bytes_per_s, 2e12);
  EXPECT_EQ(m.rate_of_rows(), 2e12);
  ASSERT_EQ(m.links.size(), 2U);
  EXPECT_EQ(m.order_margin, 0.0625);
  EXPECT_EQ(m.error_of(Pass::forward, 1), 0.15);
  EXPECT_EQ(m.error_of(Pass::forward, 2), 0.35);
  EXPECT_TRUE(std::isnan(m.error_of(Pass::backward, 2)));
  const LinkTier &node = m.links[0], &network = m.links[1];
  EXPECT_EQ(node.name, "node");
  EXPECT_EQ(node.ranks, 8);
  EXPECT_EQ(node.latency_s, 1e-6);
  EXPECT_EQ(node.bytes_per_s, 4e9);
  ASSERT_EQ(node.curve.size(), 2U);
  EXPECT_EQ(node.curve[0].bytes, 1024);
  EXPECT_EQ(node.curve[0].bytes_per_s, 1e9);
  EXPECT_EQ(node.all_at_once, 0.5);
  EXPECT_EQ(node.kernel_slowdown, 0.25);
  EXPECT_EQ(network.name, "switch");
  EXPECT_EQ(network.ranks, 0);
  EXPECT_EQ(network.bytes_per_s, 5e8);
  EXPECT_TRUE(network.curve.empty());
  EXPECT_EQ(network.all_at_once, 1);
  EXPECT_EQ(network.kernel_slowdown, 0);
  ASSERT_EQ(m.kernel.surfaces.size(), 2U);
  const KernelSurface &forward = m.kernel.surfaces[0], &backward = m.kernel.surfaces[1];
  EXPECT_EQ(forward.pass, Pass::forward);
  EXPECT_EQ(forward.type, DType::bf16);
  EXPECT_EQ(forward.head_dim, 128);
  EXPECT_EQ(forward.launch_s, 5e-6);
  EXPECT_EQ(forward.diagonal_s, 1e-10);
  EXPECT_EQ(forward.merge_s, 3e-12);
  EXPECT_EQ(forward.rows, (std::vector<double>{512, 1024}));
  EXPECT_EQ(forward.keys, (std::vector<double>{256, 512, 1024}));
  EXPECT_EQ(forward.flops_per_s, (std::vector<double>{1e12, 2e12, 3e12, 4e12, 5e12, 6e12}));
  EXPECT_EQ(backward.pass, Pass::backward);
  EXPECT_EQ(backward.type, DType::f32);
  EXPECT_EQ(backward.launch_s, 0);
  EXPECT_TRUE(backward.keys.empty());
}

TEST(MachineFile, MayHaveAnotherRateOfRows) {
  const std::string first = "[model]\n";
  std::string text = good;
  text.insert(text.find(first) + first.size(),
              "kernel_bytes_per_s = { value = 3e12, source = \"s\" }\n");
  EXPECT_EQ(parse_machine_model("m.toml", text).rate_of_rows(), 3e12);
}

TEST(MachineFile, SaysWhatARecurrenceTakes) {
  const RecurrenceModel m = parse_machine_model("m.toml", good).recurrence;
  ASSERT_EQ(m.rates.size(), 2U);
  EXPECT_EQ(m.why_not("gdn", Pass::forward, DType::bf16),
            "no recurrence gdn fwd of bf16; the machine has kda bwd of bf16, gdn fwd of f32");
  const RecurrenceRate& kda = m.of("kda", Pass::backward, DType::bf16);
  EXPECT_DOUBLE_EQ(kda.seconds({18e12, 1000}), 4e-6 + 6e-6 + 2);
  EXPECT_DOUBLE_EQ(kda.seconds({18e12, 0}), 2);  // of states alone
  EXPECT_DOUBLE_EQ(kda.seconds({18e12, 0}, true), 6);
  EXPECT_DOUBLE_EQ(m.of("gdn", Pass::forward, DType::f32).seconds({8e12, 1000}, true), 1);
}

TEST(MachineFile, SaysWhatADecoderTakesBesideAttention) {
  const DecoderModel d = parse_machine_model("m.toml", good).decoder;
  EXPECT_EQ(d.elementwise_bytes_per_s, 2e12);  // of copies
  EXPECT_EQ(d.logprob_bytes_per_s, 1e12);
  EXPECT_EQ(d.logprob_row_s, 3e-9);
  EXPECT_EQ(d.why_not(DType::f32), "no linears of f32; the machine has bf16");
  EXPECT_NEAR(d.linear_seconds(DType::bf16, 64, 32, 32), 2e-6 + 2 * 64 * 32 * 32 / 1e11, 1e-15);
  // sqrt(512 · 8192) columns are 2048; rates beyond the surface are those of its edge.
  EXPECT_NEAR(d.linear_seconds(DType::bf16, 1000, 512, 8192), 2e-6 + 2.0 * 1000 * 512 * 8192 / 4e11,
              1e-12);
  EXPECT_EQ(d.linear_seconds(DType::bf16, 0, 512, 512), 0);
  ASSERT_EQ(d.all_reduces.size(), 1U);
  const CollectiveTimes& times = d.all_reduces[0];
  EXPECT_EQ(times.ranks, 4);
  EXPECT_DOUBLE_EQ(times.seconds(8), 1e-5);
  EXPECT_DOUBLE_EQ(times.seconds(5000), 2.5e-5);
  EXPECT_DOUBLE_EQ(times.seconds(12000), 6e-5);
}

TEST(MachineFile, WhatIsWrittenIsReadAgain) {
  const auto json_of = [](const MachineModel& machine) {
    return nlohmann::ordered_json{{"schema", "gyre-machine/1"}, {"model", model_json(machine, "s")}}
        .dump();
  };
  const std::string text = json_of(parse_machine_model("m.toml", good));
  const MachineModel again = parse_machine_model("m.json", text);
  EXPECT_EQ(json_of(again), text);
  EXPECT_EQ(again.links[0].curve[1].bytes_per_s, 4e9);
  EXPECT_EQ(again.links[1].ranks, 0);
  EXPECT_EQ(again.kernel.surfaces[0].flops_per_s,
            (std::vector<double>{1e12, 2e12, 3e12, 4e12, 5e12, 6e12}));
}

TEST(MachineFile, LinksHaveTheTimesOfTheirCurve) {
  const LinkTier node = parse_machine_model("m.toml", good).links[0];
  EXPECT_DOUBLE_EQ(node.seconds(0), 0);
  EXPECT_DOUBLE_EQ(node.seconds(512), 512 / 0.5e9);
  EXPECT_DOUBLE_EQ(node.seconds(1024), 1024 / 0.5e9);
  EXPECT_DOUBLE_EQ(node.seconds((1024 + 65536) / 2.0),
                   (node.seconds(1024) + node.seconds(65536)) / 2);
  EXPECT_DOUBLE_EQ(node.seconds(65536), 65536 / 2e9);
  EXPECT_DOUBLE_EQ(node.seconds(1e9), 1e9 / 2e9);
}

TEST(MachineFile, EveryFileOfTheInputsIsAMachine) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(GYRE_SOURCE_DIR "/inputs/machines")) {
    if (entry.path().extension() != ".toml") continue;
    SCOPED_TRACE(entry.path().filename());
    ++files;
    std::ostringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    const MachineModel machine = parse_machine_model(entry.path(), text.str());
    EXPECT_NE(machine.name, "");
    EXPECT_GE(machine.memory_bytes, 40e9);
    EXPECT_EQ(machine.links.back().ranks, 0);
    for (const Pass pass : {Pass::forward, Pass::backward})
      EXPECT_EQ(machine.kernel.why_not(pass, DType::bf16), "");
    // Nothing that a GPU of today would need a new scale for: mistakes of a unit.
    for (const KernelSurface& s : machine.kernel.surfaces)
      for (const double rate : s.flops_per_s) EXPECT_TRUE(rate > 50e12 && rate < 3e15) << rate;
    for (const LinkTier& link : machine.links) {
      EXPECT_TRUE(link.bytes_per_s > 10e9 && link.bytes_per_s < 2e12) << link.bytes_per_s;
      EXPECT_TRUE(link.latency_s > 1e-6 && link.latency_s < 1e-4) << link.latency_s;
    }
  }
  EXPECT_GE(files, 9);
}

/// Expects the message of m.toml with `text` replaced.
void refuse(const std::string& message, const std::string& text, const std::string& replacement) {
  const size_t at = good.find(text);
  ASSERT_NE(at, std::string::npos) << text;
  std::string spoilt = good;
  spoilt.replace(at, text.size(), replacement);
  test::expect_usage("m.toml: " + message, [&] { parse_machine_model("m.toml", spoilt); });
}

TEST(MachineFile, RefusesWhatIsNoMachine) {
  refuse("line 3: Error while parsing key-value pair: expected value, saw '\\n'", "\"a machine\"",
         "");
  refuse("no gyre-machine/1: 'schema' says \"gyre-result/1\"", "gyre-machine/1", "gyre-result/1");
  refuse("no gyre-machine/1: 'schema' says nothing", "schema", "scheme");
  const auto json = [](const std::string& message, const std::string& text) {
    test::expect_usage("m.json: " + message, [&] { parse_machine_model("m.json", text); });
  };
  const std::string wanted = "; wanted: gyre-machine/1 in JSON or, by its name, TOML";
  const std::string error = "parse error at line 1, column 1: syntax error while parsing value - ";
  json(error + "invalid literal; last read: 's'" + wanted, good);
  json(error + "unexpected end of input; expected '[', '{', or a literal" + wanted, "");
  json("no gyre-machine/1: 'schema' says nothing", "[]");
  json("the key 'a' is there twice" + wanted,
       R"({"b": [{"a": 1}, {"a": 2}], "a": {"a": 3}, "a": 4})");
  json("no gyre-machine/1: 'schema' says 1", R"({"schema": 1})");
  json("it has no 'model', which predictions need; gyre-info --model measures one",
       R"({"schema": "gyre-machine/1"})");
  json("model is 3; wanted: an object", R"({"schema": "gyre-machine/1", "model": 3})");
  json("more than 32 levels of brackets" + wanted, std::string(100000, '['));
  std::string dots = "a";
  for (int i = 0; i < 100000; ++i) dots += ".a";
  refuse("line 3: a key of more than 32 parts", "name", dots);
  refuse("line 5: inf; wanted: a finite number, or a text in quotation marks", "64e9", "inf");
}

TEST(MachineFile, RefusesKeysThatItDoesNotKnowOrLacks) {
  refuse("model.links[0] has no 'latency'; nearest: 'latency_s'", "latency_s", "latency");
  refuse(
      "model has no 'xyz'; there are name, rank, memory_bytes, copy_bytes_per_s, "
      "kernel_bytes_per_s, "
      "links, kernels, recurrences, linears, elementwise_bytes_per_s, logprob_bytes_per_s, "
      "logprob_row_s, "
      "all_reduces, errors, order_margin",
      "rank =", "xyz =");
  refuse("model.kernels[1] has no 'dypte'; nearest: 'dtype'", "dtype = \"f32\"", "dypte = \"f32\"");
  refuse("model.links[1].latency_s has no 'vlaue'; nearest: 'value'", "{ value = 2e-5",
         "{ vlaue = 2e-5");
  refuse("model lacks 'name'", "name = \"a machine\"", "");
  refuse("model lacks 'copy_bytes_per_s'", "copy_bytes_per_s = { value = 2e12, source = \"s\" }",
         "");
  refuse("model.links[1] lacks 'bytes_per_s'", "bytes_per_s = { value = 5e8, source = \"s\" }", "");
  refuse("model.kernels[1] lacks 'head_dim'", "head_dim = 64", "");
  refuse("model.links[1].latency_s lacks 'source'", "{ value = 2e-5, source = \"s\" }",
         "{ value = 2e-5 }");
  refuse("model.links[1].latency_s lacks 'value'", "value = 2e-5, ", "");
  refuse("model.memory_bytes has no source; wanted: where the number comes from",
         "value = 64e9, source = \"s\"", "value = 64e9, source = \"\"");
  refuse("model.memory_bytes has no source; wanted: where the number comes from",
         "value = 64e9, source = \"s\"", "value = 64e9, source = \" \"");
}

TEST(MachineFile, RefusesNumbersOfAnotherUnit) {
  const auto wrong = [](const std::string& figure, const std::string& wanted, const char* meant,
                        const std::string& text, const std::string& replacement) {
    refuse(fmt::format("model.{}; wanted: {}{}", figure, wanted,
                       *meant == 0 ? "" : fmt::format("; did you mean {}?", meant)),
           text, replacement);
  };
  const std::string bytes = "bytes in a second, of which the slowest disk has more than 1e6";
  const std::string flops = "FLOPs in a second, which any processor has more than 1e7 of";
  const std::string seconds = "seconds, at most 1";
  wrong("links[1].bytes_per_s is 11.5", bytes, "1.15e+10", "5e8", "11.5");
  wrong("links[1].bytes_per_s is 11500", bytes, "1.15e+10", "5e8", "11500");
  wrong("links[0].bytes_per_s is 4", bytes, "4e+09", "[1e9, 4e9]", "[1, 4]");
  wrong("copy_bytes_per_s is 2000", bytes, "2e+09", "2e12", "2000");
  wrong("logprob_bytes_per_s is 900", bytes, "9e+11", "1e12, source", "900, source");
  wrong("links[1].latency_s is 20", seconds, "2e-05", "2e-5", "20");
  wrong("kernels[0].launch_s is 5", seconds, "5e-06", "5e-6", "5");
  wrong("kernels[1].flops_per_s is 8", flops, "8e+12", "[7e12, 8e12]", "[7, 8]");
  wrong("memory_bytes is 64", "bytes, 1e6 or more", "6.4e+10", "64e9", "64");
  wrong("links[0].kernel_slowdown is 1e+30",
        "seconds lost for each second of a transfer, at most 100", "", "0.25", "1e30");
  wrong("all_reduces[0].seconds is 11", "seconds, at most 10", "1.1e-05", "[1e-5, 3e-5]",
        "[11, 30]");
  wrong("order_margin is 7", "a share of the time, at most 1", "0.07", "0.0625", "7");
  wrong("errors[1].share is 35", "a share of the predicted time, at most 2", "0.35", "0.35", "35");
  refuse("model.errors[0].ranks is \"8\"; wanted: one or several", "\"one\"", "\"8\"");
  refuse("model.errors[0] and [1] are both fwd of several ranks", "\"one\"", "\"several\"");
  std::string slow = good;  // short messages may be slow
  slow.replace(slow.find("[1e9, 4e9]"), 10, "[999, 1e6]");
  EXPECT_EQ(parse_machine_model("m.toml", slow).links[0].curve[0].bytes_per_s, 999);
}

TEST(MachineFile, RefusesValuesOfAnotherKind) {
  refuse("model.name is 3; wanted: a text", "\"a machine\"", "3");
  refuse("model.rank is 3; wanted: a text", "\"a rank\"", "3");
  refuse("model.memory_bytes is 64000000000.0; wanted: an object",
         "{ value = 64e9, source = \"s\" }", "64e9");
  refuse("model.memory_bytes.source is 7; wanted: a text", "64e9, source = \"s\"",
         "64e9, source = 7");
  refuse("model.memory_bytes is \"64e9\"; wanted: a number", "64e9", "\"64e9\"");
  refuse("model.memory_bytes is true; wanted: a number", "64e9", "true");
  refuse("line 5: nan; wanted: a finite number, or a text in quotation marks", "64e9", "nan");
  refuse("line 4: -inf; wanted: a finite number, or a text in quotation marks", "\"a rank\"",
         "-inf");
  for (const char* value : {"5e-324", "1e-31", "1e+31", "-1e+300"})
    refuse(
        fmt::format("model.memory_bytes is {}; wanted: 0, or a number from 1e-30 to 1e30", value),
        "64e9", value);
  refuse("model.links[0].bytes_per_s[1] is 5e-324; wanted: 0, or a number from 1e-30 to 1e30",
         "4e9]", "5e-324]");
  refuse("line 16: inf; wanted: a finite number, or a text in quotation marks", "4e9]", "inf]");
  refuse("model.memory_bytes is [1,2]; wanted: a number", "64e9", "[1, 2]");
  refuse("model.links[0].ranks is 8.0; wanted: a whole number", "ranks = 8", "ranks = 8.0");
  refuse("model.links[0].message_bytes[1] is \"64K\"; wanted: a number", "65536", "\"64K\"");
  refuse("model.kernels[0].pass is \"forward\"; wanted: fwd or bwd", "\"fwd\"", "\"forward\"");
  refuse("model.kernels[0].dtype is \"f16\"; wanted: f32 or bf16", "\"bf16\"", "\"f16\"");
  test::expect_usage("m.json: model.links is 1; wanted: a list", [] {
    parse_machine_model("m.json",
                        R"({"schema": "gyre-machine/1", "model": {"name": "m", "links": 1,
                            "copy_bytes_per_s": {"value": 1e9, "source": "s"}}})");
  });
}

TEST(MachineFile, RefusesTiersThatCannotBe) {
  refuse("model.links[1].tier is 'swich'; nearest: 'switch'", "\"switch\"", "\"swich\"");
  refuse("model.links[1].tier is 'x'; wanted: one of core, socket, node, rack, switch",
         "\"switch\"", "\"x\"");
  refuse("model.links[0] and [1] are both the tier node", "\"switch\"", "\"node\"");
  refuse("model.links[0].bytes_per_s: 2 rates for 3 message_bytes", "[1024, 65536]",
         "[1024, 4096, 65536]");
  refuse("model.links[0].bytes_per_s: 2 rates for 0 message_bytes", "[1024, 65536]", "[]");
  refuse("model.links[1].bytes_per_s: 0 rates for 0 message_bytes", "5e8", "[]");
  refuse("message_bytes of 1024 behind 65536; wanted: more", "[1024, 65536]", "[65536, 1024]");
  refuse(
      "model.links[0].ranks is 0; wanted: a number of ranks from 1 on, or no 'ranks' in the "
      "outermost tier",
      "ranks = 8", "ranks = 0");
  refuse("ranks of 0 in tier node; wanted: a multiple of 1, or none for the last tier", "ranks = 8",
         "");
  refuse("ranks of 12 in tier switch; wanted: a multiple of the tier inside, 8, the nearest 16",
         "tier = \"switch\"", "tier = \"switch\"\nranks = 12");
  refuse("latency_s of -2e-05; wanted: 0 or more", "2e-5", "-2e-5");
  refuse("bytes_per_s of 0; wanted: at least 1", "5e8", "0");
  refuse("all_at_once of 1.5; wanted: more than 0, at most 1", "value = 0.5", "value = 1.5");
  refuse("kernel_slowdown of -0.25; wanted: 0 or more", "0.25", "-0.25");
  refuse("copy_bytes_per_s of -1; wanted: at least 1", "2e12", "-1");
}

TEST(MachineFile, RefusesKernelsThatCannotBe) {
  refuse("1 rows of a surface; wanted: 2 or more",
         "rows = [512, 1024]\nflops_per_s = { value = [7e12, 8e12]",
         "rows = [512]\nflops_per_s = { value = [7e12]");
  refuse("0 rows of a surface; wanted: 2 or more",
         "rows = [512, 1024]\nflops_per_s = { value = [7e12, 8e12]",
         "flops_per_s = { value = 7e12");
  refuse("1 keys of a surface; wanted: 2 or more", "[256, 512, 1024]", "[256]");
  refuse("rows of 512 at place 2; wanted: finite, above 0, ascending", "[512, 1024]\nkeys",
         "[512, 512]\nkeys");
  refuse("keys of 0 at place 1; wanted: finite, above 0, ascending", "[256, 512", "[0, 512");
  refuse("3 flops_per_s for 2 rows and 0 keys; wanted: 2", "[7e12, 8e12]", "[7e12, 8e12, 9e12]");
  refuse("flops_per_s of -5000000000000; wanted: at least 1", "5e12", "-5e12");
  refuse("launch_s of -5e-06; wanted: 0 or more", "5e-6", "-5e-6");
  refuse("model.kernels[1].head_dim is 0; wanted: a number from 1 to 1024", "head_dim = 64",
         "head_dim = 0");
  refuse("model.kernels[0] and [1] are both bf16 fwd of head_dim 128",
         "\"bwd\"\ndtype = \"f32\"\nhead_dim = 64", "\"fwd\"\ndtype = \"bf16\"\nhead_dim = 128");
  test::expect_usage("m.json: model.kernels is []; wanted: a kernel or more", [] {
    parse_machine_model("m.json", R"({"schema": "gyre-machine/1", "model": {"name": "m",
      "copy_bytes_per_s": {"value": 1e9, "source": "s"}, "links": [{"tier": "node",
      "latency_s": {"value": 0, "source": "s"}, "bytes_per_s": {"value": 1e9, "source": "s"}}],
      "kernels": []}})");
  });
}

TEST(MachineFile, RefusesRecurrencesThatCannotBe) {
  refuse("model.recurrences[0].kind is 'kdx'; nearest: 'kda'", "\"kda\"", "\"kdx\"");
  refuse("model.recurrences[0].kind is 'linear'; wanted: one of gdn, kda, ssd, gla", "\"kda\"",
         "\"linear\"");
  refuse("model.recurrences[0] and [1] are both gdn f32 fwd",
         "\"kda\"\npass = \"bwd\"\ndtype = \"bf16\"", "\"gdn\"\npass = \"fwd\"\ndtype = \"f32\"");
  refuse("model.recurrences[1] lacks 'flops_per_s'",
         "flops_per_s = { value = 8e12, source = \"s\" }", "");
  refuse("model.recurrences[0] has no 'scans_s'; nearest: 'scan_s'", "scan_s", "scans_s");
  refuse("scan_s of -6e-09; wanted: 0 or more", "6e-9", "-6e-9");
  refuse("flops_per_s of 0; wanted: at least 1", "value = 8e12", "value = 0");
  refuse("summary_flops_per_s of -1; wanted: at least 1", "value = 3e12", "value = -1");
  refuse(
      "model.recurrences[1].flops_per_s is 8; wanted: FLOPs in a second, which any processor "
      "has more than 1e7 of; did you mean 8e+12?",
      "value = 8e12", "value = 8");
}

TEST(MachineFile, RefusesDecodersThatCannotBe) {
  refuse("1 rows of a surface; wanted: 2 or more", "[64, 128]", "[64]");
  refuse("1 columns of a surface; wanted: 2 or more", "[32, 2048]", "[32]");
  refuse("4 flops_per_s for 2 rows and 3 columns; wanted: 6", "[32, 2048]", "[32, 64, 2048]");
  refuse("model.all_reduces[0].ranks is 1; wanted: a number of ranks from 2 on", "ranks = 4",
         "ranks = 1");
  refuse("model.all_reduces[0].seconds: 2 times for 1 message_bytes", "[2000, 6000]", "[2000]");
  refuse("message_bytes of 2000 behind 6000; wanted: more", "[2000, 6000]", "[6000, 2000]");
  refuse("seconds of -1; wanted: 0 or more", "[1e-5, 3e-5]", "[1e-5, -1]");
  refuse("logprob_bytes_per_s of 0; wanted: at least 1", "{ value = 1e12", "{ value = 0");
  refuse("model.linears[0] has no 'column'; nearest: 'columns'", "columns", "column");
}

}  // namespace GYRE_FILE
}  // namespace gyre
