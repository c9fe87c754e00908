#include "model/decoder_steps.hpp"

#include <algorithm>

namespace gyre {

namespace {

using namespace decoder_step;
using A = Activation;
using W = Weight;

/// A recurrent layer's steps from h to partial; attention_operations() are those of the others.
std::vector<DecoderOperation> recurrent_operations() {
  return {Relayout{A::h, A::mixer_in},
          Linear{A::mixer_in, W::wq, A::mixer_q},
          Linear{A::mixer_in, W::wk, A::mixer_k},
          Linear{A::mixer_in, W::wv, A::mixer_v},
          Linear{A::mixer_in, W::wz, A::mixer_z},
          Linear{A::mixer_in, W::wb, A::mixer_b},
          Linear{A::mixer_in, W::wa, A::mixer_a},
          Recurrence{},
          Linear{A::mixer_out, W::wo, A::mixer_partial},
          AllReduce{A::mixer_partial, "recurrent output all-reduce"},
          Relayout{A::mixer_partial, A::partial}};
}

std::vector<DecoderOperation> attention_operations(const ModelConfig& config, int64_t layer) {
  std::vector<DecoderOperation> all = {Linear{A::h, W::wq, A::q}, Linear{A::h, W::wk, A::k},
                                       Linear{A::h, W::wv, A::v}};
  const auto add = [&](bool wanted, std::initializer_list<DecoderOperation> more) {
    if (wanted) all.insert(all.end(), more);
  };
  add(config.qkv_bias, {AddBias{W::bq, A::q}, AddBias{W::bk, A::k}, AddBias{W::bv, A::v}});
  add(config.qk_norm, {HeadNorm{W::q_norm, A::q}, HeadNorm{W::k_norm, A::k}});
  add(config.kind_of(layer).rotary, {Rope{}});
  add(config.output_gate, {Linear{A::h, W::wz, A::out_gate}});
  add(true, {Attention{}});
  add(config.output_gate, {GateMultiply{GateActivation::sigmoid, A::out_gate, A::out}});
  add(true, {Linear{config.output_gate ? A::out_gate : A::out, W::wo, A::partial},
             AllReduce{A::partial, "attention output all-reduce"}});
  add(config.output_bias, {AddBias{W::bo, A::partial}});
  return all;
}

std::vector<DecoderOperation> layer_operations(const ModelConfig& config, int64_t layer) {
  std::vector<DecoderOperation> all = {Norm{W::attn_norm, layer > 0}};
  const auto add = [&](const std::vector<DecoderOperation>& more) {
    all.insert(all.end(), more.begin(), more.end());
  };
  add(config.kind_of(layer).recurrent ? recurrent_operations()
                                      : attention_operations(config, layer));
  add({Norm{W::mlp_norm, true}, Linear{A::h, W::w_gate, A::gate}, Linear{A::h, W::w_up, A::up},
       GateMultiply{config.hidden_act}, Linear{A::gate, W::w_down, A::partial},
       AllReduce{A::partial, "MLP all-reduce"}});
  return all;
}

}  // namespace

std::vector<DecoderStep> decoder_steps(const ModelConfig& config) {
  std::vector<DecoderStep> steps = {{0, Embed{}}, {0, AllReduce{A::x, "embedding all-reduce"}}};
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
    for (const DecoderOperation& operation : layer_operations(config, layer))
      steps.push_back({layer + 1, operation});
  const int64_t scores = config.num_hidden_layers + 1;
  steps.push_back({scores, Norm{W::final_norm, config.num_hidden_layers > 0}});
  steps.push_back({scores, Again{}});
  steps.push_back({scores, Score{config.tied_head ? W::embed : W::head}});
  return steps;
}

int64_t local_kv_heads(const ModelConfig& config, int tp) {
  return std::max<int64_t>(1, config.num_key_value_heads / tp);
}

int64_t local_vocab(const ModelConfig& config, int tp) {
  return config.vocab_padded / tp;
}

int64_t scored_vocab(const ModelConfig& config, int tp) {
  return std::min(config.vocab_size, local_vocab(config, tp));
}

int64_t width_of(Activation activation, const ModelConfig& config, int tp) {
  switch (activation) {
    case Activation::x:
    case Activation::h:
    case Activation::partial:
      return config.hidden_size;
    case Activation::q:
    case Activation::out:
      return config.query_width() / tp;
    case Activation::out_gate:
      return config.output_gate ? config.query_width() / tp : 0;
    case Activation::k:
    case Activation::v:
      return local_kv_heads(config, tp) * config.head_dim;
    case Activation::mixer_in:
    case Activation::mixer_partial:
      return config.recurrent_layers() > 0 ? config.hidden_size : 0;
    case Activation::mixer_q:
    case Activation::mixer_k:
      return config.recurrent.key_width() / tp;
    case Activation::mixer_v:
    case Activation::mixer_z:
    case Activation::mixer_out:
      return config.recurrent.value_width() / tp;
    case Activation::mixer_b:
    case Activation::mixer_a:
      return config.recurrent.value_heads / tp;
    case Activation::gate:
    case Activation::up:
      break;
  }
  return config.intermediate_size / tp;
}

}  // namespace gyre
