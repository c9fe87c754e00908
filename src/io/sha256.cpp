#include "io/sha256.hpp"

#include <openssl/evp.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "io/resources.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {

std::string sha256_of_file(const std::string& path) {
  require_regular_file(path);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (file == nullptr) throw_usage("cannot read '{}': {}", path, std::strerror(errno));
  const std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context(EVP_MD_CTX_new(),
                                                                   EVP_MD_CTX_free);
  bool good = EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1;
  std::vector<unsigned char> block(size_t{1} << 20);
  while (true) {
    const WaitScope scope("reading " + path);  // of one block: a long file is no reason to give up
    const size_t count = std::fread(block.data(), 1, block.size(), file.get());
    if (count == 0) break;
    good = good && EVP_DigestUpdate(context.get(), block.data(), count) == 1;
  }
  if (std::ferror(file.get()) != 0)
    throw_runtime("cannot read '{}': {}", path, std::strerror(errno));

  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  good = good && EVP_DigestFinal_ex(context.get(), digest, &length) == 1;
  if (!good) throw_runtime("OpenSSL cannot compute SHA-256 of '{}'", path);
  std::string hex;
  for (unsigned i = 0; i < length; ++i) hex += fmt::format("{:02x}", digest[i]);
  return hex;
}

std::string sha256_of_file(Communicator& comm, const std::string& path) {
  std::string hex;
  run_on_root(comm, "computing SHA-256 of " + path, [&] { hex = sha256_of_file(path); });
  return broadcast_string(comm, hex, 0);
}

}  // namespace gyre
