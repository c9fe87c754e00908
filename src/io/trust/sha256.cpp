#include "io/trust/sha256.hpp"

#include <openssl/evp.h>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "io/resources.hpp"

namespace gyre {
namespace {

void require(bool good) {
  if (!good) throw_runtime("OpenSSL cannot compute SHA-256");
}

}  // namespace

Sha256::Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
  require(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
}

void Sha256::add(const void* bytes, size_t count) {
  require(EVP_DigestUpdate(context_.get(), bytes, count) == 1);
}

std::string Sha256::hex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  require(EVP_DigestFinal_ex(context_.get(), digest, &length) == 1);
  std::string text;
  for (unsigned i = 0; i < length; ++i) text += fmt::format("{:02x}", digest[i]);
  return text;
}

std::string sha256_of_file(const std::string& path) {
  Sha256 sha256;
  read_blocks(path, [&](std::string_view block) { sha256.add(block.data(), block.size()); });
  return sha256.hex();
}

std::string sha256_of_file(Communicator& comm, const std::string& path) {
  std::string hex;
  run_on_root(comm, "computing SHA-256 of " + path, [&] { hex = sha256_of_file(path); });
  return broadcast_string(comm, hex, 0);
}

}  // namespace gyre
