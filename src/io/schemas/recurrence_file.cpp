#include "io/schemas/recurrence_file.hpp"

#include <limits>

#include "comm/agree.hpp"

namespace gyre {
namespace {

struct Parts {
  std::optional<h5::Dataset> offsets, q, k, v, g, beta, d_out, conv_weight;
  std::map<std::string, std::optional<h5::Dataset>> answers;
};

/// Opens g, whose rank says whether channels have decays of their own.
std::optional<h5::Dataset> open_decays(SchemaReader& reader, const h5::File& file,
                                       RecurrenceFile& r, int64_t tokens) {
  const std::string path = "/recurrence/g";
  const bool of_channels = reader.is_there(path) && file.dataset(path).shape().size() == 3;
  if (of_channels) r.decay_dim = r.key_dim;
  return of_channels ? reader.reals(path, {tokens, r.heads, r.key_dim})
                     : reader.reals(path, {tokens, r.heads});
}

void open_weights(SchemaReader& reader, RecurrenceFile& r, Parts& parts) {
  parts.conv_weight = reader.reals_if("/recurrence/conv_weight", {r.channels(), -1});
  if (!parts.conv_weight) return;
  r.conv_width = parts.conv_weight->shape()[1];
  if (r.conv_width < 1 || r.conv_width > max_convolution)
    reader.errors().add("/recurrence/conv_weight has {} weights of a channel; it must be 1 to {}",
                        r.conv_width, max_convolution);
}

void open_reference(SchemaReader& reader, const h5::File& file, RecurrenceFile& r, Parts& parts) {
  RecurrenceReference& reference = r.reference.emplace();
  reference.generator = reader.text("/reference", "generator", "");
  reference.unknown = unknown_answers(file, recurrence_schema);
  const auto open = [&](const char* name, const std::optional<h5::Dataset>& like) {
    if (like)
      parts.answers[name] = reader.reals_if(std::string("/reference/") + name, like->shape());
  };
  for (const std::string name : {"beta", "conv_weight"})
    if (reader.is_there("/reference/d_" + name) && !reader.is_there("/recurrence/" + name))
      reader.errors().add("/reference/d_{0} is there, and /recurrence/{0}, which it is of, is not",
                          name);
  open("out", parts.v);
  open("d_q", parts.q);
  open("d_k", parts.k);
  open("d_v", parts.v);
  open("d_g", parts.g);
  open("d_beta", parts.beta);
  open("d_conv_weight", parts.conv_weight);
}

Parts open_recurrence(const h5::File& file, RecurrenceFile& r) {
  SchemaReader reader(file, recurrence_schema);
  ConfigErrors& errors = reader.errors();
  Parts parts;
  r.scale = reader.real("/recurrence", "scale");
  constexpr double least = std::numeric_limits<float>::min(),
                   most = std::numeric_limits<float>::max();
  if (!(r.scale >= least && r.scale <= most))
    errors.add(
        "scale of '/recurrence' is {}; it must be from {:.3g} to {:.3g}, as 1 / "
        "sqrt(key_dim)",
        r.scale, least, most);
  parts.offsets = reader.integers("/recurrence/offsets", {-1});
  r.heads = r.key_heads = r.key_dim = r.value_dim = -1;  // -1 matches any extent
  int64_t tokens = -1;
  parts.q = reader.reals("/recurrence/q", {-1, -1, -1});
  if (parts.q) tokens = parts.q->shape()[0];
  if (parts.q) r.key_heads = parts.q->shape()[1], r.key_dim = parts.q->shape()[2];
  parts.k = reader.reals("/recurrence/k", {tokens, r.key_heads, r.key_dim});
  parts.v = reader.reals("/recurrence/v", {tokens, -1, -1});
  if (parts.v) r.heads = parts.v->shape()[1], r.value_dim = parts.v->shape()[2];
  for (const auto& [dataset, name] : {std::pair(&parts.q, "q"), {&parts.v, "v"}})
    if (*dataset && ((*dataset)->shape()[1] < 1 || (*dataset)->shape()[2] < 1))
      errors.add("/recurrence/{} is {}; it needs a head and an element of it", name,
                 h5::to_string((*dataset)->shape()));
  if (parts.q && parts.v && r.key_heads > 0 && r.heads % r.key_heads != 0)
    errors.add(
        "/recurrence/v has {} heads and /recurrence/q has {}; the former must be a multiple "
        "of the latter",
        r.heads, r.key_heads);
  parts.g = open_decays(reader, file, r, tokens);
  parts.beta = reader.reals_if("/recurrence/beta", {tokens, r.heads});
  r.with_beta = parts.beta.has_value();
  if (parts.q && parts.v) open_weights(reader, r, parts);
  parts.d_out = reader.reals("/recurrence/d_out", {tokens, r.heads, r.value_dim});
  if (file.has_group("/reference")) open_reference(reader, file, r, parts);
  reader.throw_if_any();
  return parts;
}

void check_numbers(const h5::File& file, const RecurrenceFile& r) {
  SchemaReader reader(file, recurrence_schema);
  ConfigErrors& errors = reader.errors();
  check_offsets(errors, "/recurrence/offsets", r.offsets,
                std::ssize(r.q) / (r.key_heads * r.key_dim), "the rows of /recurrence/q");
  for (const auto& [name, values] : {std::pair("q", &r.q),
                                     {"k", &r.k},
                                     {"v", &r.v},
                                     {"g", &r.g},
                                     {"beta", &r.beta},
                                     {"conv_weight", &r.conv_weight},
                                     {"d_out", &r.d_out}})
    check_finite(errors, std::string("/recurrence/") + name, *values);
  if (r.reference)
    for (const auto& [name, values] : r.reference->arrays)
      check_finite(errors, "/reference/" + name, values);
  reader.throw_if_any();
}

}  // namespace

RecurrenceFile read_recurrence_file(Communicator& comm, const std::string& path) {
  const h5::File file = open_schema_file(comm, path, recurrence_schema);
  RecurrenceFile r;
  Parts parts;
  run_agreed(comm, "opening the recurrence of " + path, [&] { parts = open_recurrence(file, r); });
  r.offsets = parts.offsets->read_all<int64_t>();
  r.q = read_floats(*parts.q, r.rounded);
  r.k = read_floats(*parts.k, r.rounded);
  r.v = read_floats(*parts.v, r.rounded);
  r.g = read_floats(*parts.g, r.rounded);
  if (parts.beta) r.beta = read_floats(*parts.beta, r.rounded);
  if (parts.conv_weight) r.conv_weight = read_floats(*parts.conv_weight, r.rounded);
  r.d_out = read_floats(*parts.d_out, r.rounded);
  for (const auto& [name, dataset] : parts.answers)
    if (dataset) r.reference->arrays[name] = dataset->read_all<double>();
  run_agreed(comm, "checking the recurrence of " + path, [&] { check_numbers(file, r); });
  return r;
}

}  // namespace gyre
