#pragma once
// SHA-256 of bytes and of files.

#include <cstddef>
#include <memory>
#include <string>

#include "comm/communicator.hpp"

struct evp_md_ctx_st;  // OpenSSL's type

namespace gyre {

/// SHA-256 of bytes added in parts. Throws a runtime error if OpenSSL fails.
class Sha256 {
 public:
  Sha256();
  void add(const void* bytes, size_t count);
  /// 64 hexadecimal digits. Called once, at the end.
  std::string hex();

 private:
  std::unique_ptr<evp_md_ctx_st, void (*)(evp_md_ctx_st*)> context_;
};

/// SHA-256 of a file's bytes, 64 hexadecimal digits. A file that cannot be opened is a usage error.
std::string sha256_of_file(const std::string& path);

/// SHA-256 of a file's bytes, on every rank; rank 0 reads the file. Collective.
std::string sha256_of_file(Communicator& comm, const std::string& path);

}  // namespace gyre
