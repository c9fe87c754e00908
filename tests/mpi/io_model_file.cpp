// Model files: slices read by ranks, and every way in which a model can be wrong.

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <map>

#include "comm/collective.hpp"
#include "io/schemas/model_file.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_error;
using test::on_root;
using test::SharedFolder;
using test::world;

const ModelConfig small{5, 8, 6, 2, 4, 2, 2, 10, 10000.0, 1e-5};

/// Element `i` of every tensor.
float value_of(int64_t i) {
  return 0.5F * static_cast<float>(i) - 3;
}

void write_config(h5::File& file, const ModelConfig& c) {
  const std::pair<const char*, int64_t> sizes[] = {{"vocab_size", c.vocab_size},
                                                   {"vocab_padded", c.vocab_padded},
                                                   {"hidden_size", c.hidden_size},
                                                   {"num_hidden_layers", c.num_hidden_layers},
                                                   {"num_attention_heads", c.num_attention_heads},
                                                   {"num_key_value_heads", c.num_key_value_heads},
                                                   {"head_dim", c.head_dim},
                                                   {"intermediate_size", c.intermediate_size}};
  for (auto [name, value] : sizes) file.write_attribute("/model", name, value);
  file.write_attribute("/model", "rope_theta", c.rope_theta);
  file.write_attribute("/model", "rms_norm_eps", c.rms_norm_eps);
}

/// A model of `config` whose tensors may be left out, reshaped or changed in places. By rank 0.
struct RawModel {
  ModelConfig config = small;
  std::map<std::string, h5::Shape> shapes{};  ///< instead of the right ones; an empty one: left out
  std::map<std::string, std::map<int64_t, float>> changes{};
  h5::Checksum checksum = h5::Checksum::none;
  std::map<std::string, h5::Type> types{};  ///< instead of float32

  void save(const std::string& path) const {
    on_root([&] {
      h5::File file = h5::File::create(path);
      write_schema(file, model_schema, {});
      file.create_group("/model");
      write_config(file, config);
      for (auto [name, shape] : model_tensors(small)) {
        if (shapes.contains(name)) shape = shapes.at(name);
        const auto change = changes.find(name);
        if (!shape.empty()) {
          std::vector<float> values;
          for (int64_t i = 0; i < h5::elements_of(shape); ++i) values.push_back(value_of(i));
          if (change != changes.end())
            for (auto [i, value] : change->second) values[i] = value;
          write(file, "/model/" + name, types.contains(name) ? types.at(name) : h5::Type::f32,
                values, shape);
        }
      }
      file.close();
    });
  }

  void write(h5::File& file, const std::string& path, h5::Type type,
             const std::vector<float>& values, const h5::Shape& shape) const {
    const h5::Slab all{h5::Shape(shape.size(), 0), shape};
    file.create_dataset(path, h5::stored_type_of(type), shape, checksum);
    file.dataset(path).write<float>(std::span(&all, 1), std::span<const float>(values));
  }
};

void expect_rejected(const RawModel& raw, const std::vector<std::string>& messages) {
  const SharedFolder folder;
  raw.save(folder.file("m.h5"));
  for (const std::string& message : messages)
    expect_error(ExitCode::usage, message, [&] { ModelFile(world(), folder.file("m.h5")); });
}

/// Every rank reads its own rectangle of wq [6, 8], the last rank none.
void expect_slices(ModelFile& model) {
  const int64_t rank = world().rank() % 4;
  const bool idle = world().size() > 1 && world().rank() == world().size() - 1;
  const int64_t rows = idle ? 0 : 3 + rank % 2, row = 1, column = 2 * rank;
  const Buffer<float> slice = model.read_matrix("layers/1/wq", row, rows, column, 2);
  EXPECT_EQ(slice.size(), rows * 2);
  for (int64_t i = 0; i < slice.size(); ++i)
    EXPECT_EQ(slice[i], value_of((row + i / 2) * 8 + column + i % 2));
}

TEST(ModelFile, ConfigurationAndSlices) {
  const SharedFolder folder;
  for (h5::Checksum checksum : {h5::Checksum::none, h5::Checksum::fletcher32}) {
    RawModel{.checksum = checksum}.save(folder.file("m.h5"));
    ModelFile model(world(), folder.file("m.h5"));
    EXPECT_EQ(model.config().vocab_padded, 8);
    EXPECT_EQ(model.config().num_key_value_heads, 2);
    EXPECT_EQ(model.config().rope_theta, 10000.0);
    EXPECT_EQ(model.config().rms_norm_eps, 1e-5);
    expect_slices(model);
    const int64_t old = set_transfer_limit_bytes(32);
    expect_slices(model);
    set_transfer_limit_bytes(old);
  }
}

TEST(ModelFile, VectorsAreOneRow) {
  const SharedFolder folder;
  RawModel().save(folder.file("m.h5"));
  ModelFile model(world(), folder.file("m.h5"));
  const Buffer<float> whole = model.read_vector("final_norm");
  EXPECT_EQ(whole.size(), 6);
  const Buffer<float> part = model.read_matrix("layers/0/attn_norm", 0, 1, 2, 3);
  EXPECT_EQ(part.size(), 3);
  EXPECT_EQ(part[0], value_of(2));
}

TEST(ModelFile, EachTensorHasItsOwnType) {
  const SharedFolder folder;
  std::map<std::string, h5::Type> types;
  for (const auto& [name, shape] : model_tensors(small)) types[name] = h5::Type::bfloat16;
  types["final_norm"] = h5::Type::f32;  // no matrix
  for (const h5::Type wq : {h5::Type::bfloat16, h5::Type::float16, h5::Type::f32}) {
    types["layers/1/wq"] = wq;
    RawModel{.types = types}.save(folder.file("m.h5"));
    ModelFile model(world(), folder.file("m.h5"));
    EXPECT_EQ(model.widest_matrix_type(), wq);
    expect_slices(model);
    EXPECT_EQ(model.read_vector("layers/0/attn_norm")[5], value_of(5));
    const Buffer<float> embed = model.read_matrix("embed", 2, 3, 1, 4);
    for (int64_t i = 0; i < 12; ++i) EXPECT_EQ(embed[i], value_of((2 + i / 4) * 6 + 1 + i % 4));
  }
}

void add_attribute(hid_t file, const char* name, int64_t value) {
  test::make_attribute(file, "/model", name, H5T_NATIVE_INT64, &value);
}

void add_text(hid_t file, const char* name, const std::string& value) {
  const h5::Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type.get(), value.size());
  test::make_attribute(file, "/model", name, type.get(), value.data());
}

TEST(ModelFileRejected, WhatTheDecoderDoesNotCompute) {
  const SharedFolder folder;
  const auto add_dataset = [](const char* name) {
    return [name](hid_t file) { test::make_dataset(file, name, H5T_IEEE_F32LE, {6}); };
  };
  for (
      const auto& [message, change] :
      std::vector<std::pair<std::string, std::function<void(hid_t)>>>{
          {"'sliding_window' is -1; wanted: a number of tokens from 1 on",
           [](hid_t file) { add_attribute(file, "sliding_window", -1); }},
          {"'use_sliding_window' is 1, but there is no 'sliding_window'",
           [](hid_t file) { add_attribute(file, "use_sliding_window", 1); }},
          {R"('layer_types' has "sliding_attention", but there is no 'sliding_window')",
           [](hid_t file) {
             add_text(file, "layer_types", R"(["full_attention", "sliding_attention"])");
           }},
          {R"(wanted: a list of "full_attention", "sliding_attention" or "linear_attention" for each of)",
           [](hid_t file) { add_text(file, "layer_types", R"(["full_attention", "linear"])"); }},
          {"'attn_logit_softcapping' is 30, which means another decoder; wanted: 0 or false",
           [](hid_t file) { add_attribute(file, "attn_logit_softcapping", 30); }},
          {"'final_logit_softcapping' is -1; wanted: a number above 0",
           [](hid_t file) { add_attribute(file, "final_logit_softcapping", -1); }},
          {"'hidden_act' is 'gelu_10', which means another decoder; wanted: silu or swish or gelu "
           "or gelu_pytorch_tanh or gelu_new or gelu_fast, or leave it out",
           [](hid_t file) { add_text(file, "hidden_act", "gelu_10"); }},
          {"'/model/layers/0/q_norm' is none of this decoder's tensors",
           add_dataset("/model/layers/0/q_norm")},
          {"'/model/layers/1/bq' is none of this decoder's tensors (2 layers without qkv_bias",
           add_dataset("/model/layers/1/bq")},
          {"there is no dataset '/model/layers/1/bv'; it must be float32 or float16 or bfloat16 "
           "[4]",
           [](hid_t file) { add_attribute(file, "qkv_bias", 1); }},
          {"'/model/layers/1/sinks' is none of this decoder's tensors",
           add_dataset("/model/layers/1/sinks")},
          {"there is no dataset '/model/layers/0/sinks'; it must be float32 or float16 or "
           "bfloat16 [4]",
           [](hid_t file) { add_attribute(file, "attention_sinks", 1); }},
          {"there is no dataset '/model/layers/0/bo'; it must be float32 or float16 or bfloat16 "
           "[6]",
           [](hid_t file) { add_attribute(file, "attention_bias", 1); }},
          {"there is no dataset '/model/layers/0/k_norm'; it must be float32 or float16 or "
           "bfloat16 [2]",
           [](hid_t file) { add_attribute(file, "qk_norm", 1); }},
          {"there is no dataset '/model/layers/0/wz'; it must be float32 or float16 or bfloat16 "
           "[6, 8]",
           [](hid_t file) { add_attribute(file, "attn_output_gate", 1); }},
          {"'/model/layers/1/wz' is none of this decoder's tensors",
           add_dataset("/model/layers/1/wz")},
          {"'model_type' is 'qwen3_5_text', which wants the attribute 'attn_output_gate'",
           [](hid_t file) { add_text(file, "model_type", "qwen3_5_text"); }},
          {"'qk_norm' is 2; wanted: true or false",
           [](hid_t file) { add_attribute(file, "qk_norm", 2); }},
          {"'model_type' is 'gemma', which means another decoder; wanted: llama, mistral, qwen2",
           [](hid_t file) { add_text(file, "model_type", "gemma"); }},
          {"'model_type' is 'qwen3', which wants the attribute 'qk_norm'",
           [](hid_t file) { add_text(file, "model_type", "qwen3"); }},
          {"'no_rope_layers' is '[1]'; wanted: a list of 1 or 0 for each of 2 layers",
           [](hid_t file) { add_text(file, "no_rope_layers", "[1]"); }},
          {"'no_rope_layers' is '[1, 2]'; wanted: a list of 1 or 0 for each of 2 layers",
           [](hid_t file) { add_text(file, "no_rope_layers", "[1, 2]"); }}}) {
    RawModel().save(folder.file("m.h5"));
    on_root([&] { test::change_file(folder.file("m.h5"), change); });
    expect_error(ExitCode::usage, message, [&] { ModelFile(world(), folder.file("m.h5")); });
  }
}

TEST(ModelFile, AttributesThatChangeNothingAreRead) {
  const SharedFolder folder;
  const std::string path = folder.file("m.h5");
  RawModel().save(path);
  EXPECT_EQ(ModelFile(world(), path).tokenizer(), "");
  on_root([&] {
    test::change_file(path, [](hid_t file) { add_attribute(file, "sliding_window", 0); });
  });
  EXPECT_EQ(ModelFile(world(), path).config().hidden_size, 6);
  EXPECT_EQ(ModelFile(world(), GYRE_SOURCE_DIR "/inputs/model_tiny.h5").tokenizer(),
            "byte-bos-eos");
}

/// The model with attributes that change its rotary embedding.
ModelConfig config_with(const std::function<void(hid_t)>& change) {
  const SharedFolder folder;
  RawModel().save(folder.file("m.h5"));
  on_root([&] { test::change_file(folder.file("m.h5"), change); });
  return ModelFile(world(), folder.file("m.h5")).config();
}

TEST(ModelFile, RotaryScaling) {
  const ModelConfig llama = config_with([](hid_t file) {
    add_text(file, "rope_scaling",
             R"({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 64})");
  });
  EXPECT_EQ(llama.rope_scaling, (RopeScaling{.type = RopeType::llama3,
                                             .factor = 8,
                                             .original_max_position_embeddings = 64,
                                             .low_freq_factor = 1,
                                             .high_freq_factor = 4}));
  EXPECT_EQ(llama.rotary_width(), 2);
  const ModelConfig yarn = config_with([](hid_t file) {
    add_text(file, "rope_parameters",
             R"({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                 "mscale": 2.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0})");
  });
  EXPECT_EQ(yarn.rope_scaling.type, RopeType::yarn);
  EXPECT_NEAR(yarn.rope_scaling.attention_factor,
              (0.2 * std::log(4.0) + 1) / (0.1 * std::log(4.0) + 1), 1e-15);
  const ModelConfig none = config_with([](hid_t file) { add_text(file, "rope_scaling", "null"); });
  EXPECT_EQ(none.rope_scaling, RopeScaling());
}

TEST(ModelFile, ActivationOfTheGate) {
  for (const auto& [name, activation] : {std::pair("silu", GateActivation::silu),
                                         {"swish", GateActivation::silu},
                                         {"gelu", GateActivation::gelu},
                                         {"gelu_pytorch_tanh", GateActivation::gelu_tanh},
                                         {"gelu_new", GateActivation::gelu_tanh},
                                         {"gelu_fast", GateActivation::gelu_tanh}})
    EXPECT_EQ(config_with([&](hid_t file) { add_text(file, "hidden_act", name); }).hidden_act,
              activation)
        << name;
}

TEST(ModelFile, Windows) {
  const ModelConfig all =
      config_with([](hid_t file) { add_attribute(file, "sliding_window", 128); });
  EXPECT_EQ(all.kind_of(0).window, 128);
  EXPECT_EQ(all.kind_of(1).window, 128);
  const ModelConfig second = config_with([](hid_t file) {
    add_attribute(file, "sliding_window", 3);
    add_text(file, "layer_types", R"(["full_attention", "sliding_attention"])");
  });
  EXPECT_EQ(second.kind_of(0).window, 0);
  EXPECT_EQ(second.kind_of(1).window, 3);
  const ModelConfig off = config_with([](hid_t file) {
    add_attribute(file, "sliding_window", 3);
    add_attribute(file, "use_sliding_window", 0);
  });
  EXPECT_TRUE(off.layer_kinds.empty());
}

TEST(ModelFile, LayersThatDoNotTurn) {
  const ModelConfig alike =
      config_with([](hid_t file) { add_text(file, "no_rope_layers", "[1, 1]"); });
  EXPECT_TRUE(alike.layer_kinds.empty());
  const ModelConfig config =
      config_with([](hid_t file) { add_text(file, "no_rope_layers", "[1, 0]"); });
  EXPECT_TRUE(config.kind_of(0).rotary);
  EXPECT_FALSE(config.kind_of(1).rotary);
}

TEST(ModelFileRejected, RotaryScaling) {
  const SharedFolder folder;
  for (const auto& [value, message] : std::vector<std::pair<std::string, std::string>>{
           {"[1]", "'rope_scaling' is '[1]'; wanted: an object with 'rope_type'"},
           {R"({"rope_type": "dynamic", "factor": 2.0})",
            "'rope_scaling' is of the type \"dynamic\"; types that can be computed are default"},
           {R"({"rope_type": "linear"})", "'rope_scaling' of type linear lacks 'factor'"},
           {R"({"rope_type": "linear", "factor": "two"})",
            "'factor' of 'rope_scaling' is \"two\"; wanted: a number"},
           {R"({"rope_type": "linear", "factor": 2, "beta_fast": 3})",
            "'rope_scaling' has the key 'beta_fast', which the type linear does not read"},
           {R"({"rope_type": "linear", "factor": 0})", "it must be positive"},
           {R"({"rope_type": "llama3", "factor": 2, "original_max_position_embeddings": 8,
                "low_freq_factor": 4, "high_freq_factor": 4})",
            "high_freq_factor is 4; it must be above low_freq_factor = 4"},
           {R"({"rope_type": "yarn", "factor": 2})", "lacks 'original_max_position_embeddings'"},
           {R"({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8,
                "beta_fast": 1})",
            "beta_fast is 1; it must be above beta_slow = 1"},
           {R"({"rope_type": "divided", "divisors": [1, 2]})", "has 2 divisors; 1 pairs turn"},
           {R"({"rope_theta": 5.0})", "rope_theta' of 'rope_scaling' is 5, but 'rope_theta' says"},
           {R"({"partial_rotary_factor": 0.5})", "rotary embedding turns 1 of 2 elements"}}) {
    RawModel().save(folder.file("m.h5"));
    on_root([&] {
      test::change_file(folder.file("m.h5"),
                        [&value = value](hid_t file) { add_text(file, "rope_scaling", value); });
    });
    expect_error(ExitCode::usage, message, [&] { ModelFile(world(), folder.file("m.h5")); });
  }
}

TEST(ModelFileRejected, ConfigurationAndTensors) {
  ModelConfig bad = small, deep = small, endless = small, large = small;
  bad.vocab_padded = 4;
  bad.num_attention_heads = 3;
  bad.head_dim = 3;
  bad.intermediate_size = 0;
  bad.rope_theta = -1;
  bad.rms_norm_eps = -1e-6;
  deep.num_hidden_layers = 16384;
  endless.num_hidden_layers = std::numeric_limits<int32_t>::max();
  large.vocab_size = large.vocab_padded = large.hidden_size = large.num_hidden_layers =
      large.num_attention_heads = large.num_key_value_heads = large.head_dim =
          large.intermediate_size = int64_t{1} << 25;
  expect_rejected(
      {.config = bad},
      {"m.h5' breaks the schema gyre/model version 1:",
       "vocab_padded is 4; it must be at least vocab_size = 5",
       "num_attention_heads is 3; it must be a multiple of num_key_value_heads = 2",
       "head_dim is 3; it must be even", "intermediate_size is 0; it must be at least 1",
       "rope_theta is -1; it must be positive", "rms_norm_eps is -1e-06; it must not be negative"});
  expect_rejected({.config = deep}, {"there is no dataset '/model/layers/16383/attn_norm'"});
  expect_rejected({.config = endless},
                  {"num_hidden_layers is 2147483647; it must be at most 16384"});
  expect_rejected({.config = large}, {"vocab_size is 33554432; it must be at most 16777216",
                                      "vocab_padded is 33554432; it must be at most 16777216",
                                      "hidden_size is 33554432; it must be at most 1048576",
                                      "num_hidden_layers is 33554432; it must be at most 16384",
                                      "num_attention_heads is 33554432; it must be at most 4096",
                                      "num_key_value_heads is 33554432; it must be at most 4096",
                                      "head_dim is 33554432; it must be at most 1024",
                                      "intermediate_size is 33554432; it must be at most 4194304"});
  expect_rejected(
      {.shapes = {{"layers/1/wo", {}}, {"head", {6, 5}}, {"layers/0/mlp_norm", {6, 1}}}},
      {"there is no dataset '/model/layers/1/wo'; it must be float32 or float16 or bfloat16 [8, 6]",
       "dataset '/model/head' is float32 [6, 5]; it must be float32 or float16 or bfloat16 [6, 8]",
       "dataset '/model/layers/0/mlp_norm' is float32 [6, 1]; it must be float32 or float16 or "
       "bfloat16 [6]"});
  expect_rejected({.types = {{"head", h5::Type::f64}}},
                  {"dataset '/model/head' is float64 [6, 8]; it must be float32 or float16 or "
                   "bfloat16 [6, 8]"});
}

TEST(ModelFileRejected, MissingAttributes) {
  const SharedFolder folder;
  on_root([&] {
    h5::File file = h5::File::create(folder.file("m.h5"));
    write_schema(file, model_schema, {});
    file.create_group("/model");
    file.write_attribute("/model", "hidden_size", std::string("six"));
    file.close();
  });
  for (const char* part : {"attribute 'hidden_size' of '/model' is 'six'; it must be integer",
                           "'/model' has no real attribute 'rope_theta'"})
    expect_error(ExitCode::usage, part, [&] { ModelFile(world(), folder.file("m.h5")); });
}

TEST(ModelFileRejected, NotFinite) {
  const SharedFolder folder;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  RawModel{.changes = {{"embed", {{13, nan}}}, {"final_norm", {{4, -inf}}}}}.save(
      folder.file("m.h5"));
  ModelFile model(world(), folder.file("m.h5"));
  expect_error(ExitCode::usage, "/model/embed[2, 1] is nan; weights must be finite",
               [&] { model.read_matrix("embed", 0, 8, 0, 6); });
  expect_error(ExitCode::usage, "/model/final_norm[4] is -inf; weights must be finite",
               [&] { model.read_vector("final_norm"); });
  const int last = world().size() - 1;  // only the last rank's slice has it
  expect_error(ExitCode::usage, "/model/embed[2, 1] is nan; weights must be finite",
               [&] { model.read_matrix("embed", 1, world().rank() == last ? 3 : 1, 0, 6); });
  EXPECT_EQ(model.read_matrix("embed", 3, 2, 0, 6).size(), 12);
}

TEST(ModelFileRejected, DamagedOnOneRank) {
  const SharedFolder folder;
  RawModel{.changes = {{"head", {{40, 123456.75F}, {41, 7654321.5F}}}},
           .checksum = h5::Checksum::fletcher32}
      .save(folder.file("m.h5"));
  on_root([&] {
    const float values[2] = {123456.75F, 7654321.5F};
    test::copy_damaged(folder.file("m.h5"), folder.file("bad.h5"),
                       std::string(reinterpret_cast<const char*>(values), sizeof(values)));
  });
  ModelFile model(world(), folder.file("bad.h5"));
  const bool reads = world().rank() == world().size() - 1;
  expect_error(ExitCode::runtime,
               "cannot read dataset '/model/head' of '" + folder.file("bad.h5") +
                   "': data error detected by Fletcher32 checksum",
               [&] { model.read_matrix("head", 0, reads ? 6 : 0, 0, 8); });
  EXPECT_EQ(model.read_matrix("embed", 0, 8, 0, 6).size(), 48) << "the others can still be read";
}

}  // namespace GYRE_FILE
}  // namespace gyre
