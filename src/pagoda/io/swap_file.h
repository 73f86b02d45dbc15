// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "pagoda/base/bytes.h"
#include "pagoda/io/owner_process.h"

namespace pagoda::io {

/// Whether transfers go round the page cache.
enum class Direct {
  Auto,  ///< where the file system allows it; logged where not
  On,    ///< or a UserError
  Off,
};

/// How a file's space is claimed when it is made.
enum class Preallocate {
  Reserve,  ///< fallocate: at once; the first write of a block costs the file system a little more
  Zero,     ///< written with zeros: slow once, every later write is an overwrite
};

/// How large a file of this process may be, as RLIMIT_FSIZE (ulimit -f) says; nothing where it says
/// nothing. Beyond it the kernel sends a signal that ends a process which does not ignore it.
std::optional<Bytes> file_size_limit();

/// A private file of fixed size in `directory`: mode 0600, without a name, so that it is gone when
/// its process is, killed or not.
///
/// All its space is claimed by the constructor: a disk that is too full is a UserError there, and
/// never an error of a later write. Immutable afterwards; any thread may use the descriptor.
class SwapFile {
 public:
  struct Options {
    Direct direct = Direct::Auto;
    Preallocate preallocate = Preallocate::Reserve;
  };

  SwapFile(const std::filesystem::path& directory, Bytes size, Options options);
  SwapFile(SwapFile&& other) noexcept;
  SwapFile& operator=(SwapFile&&) = delete;
  ~SwapFile();

  int fd() const noexcept { return fd_; }
  Bytes size() const noexcept { return size_; }
  bool direct() const noexcept { return direct_; }
  /// Offsets and lengths of transfers are multiples of this; 1 without O_DIRECT.
  Bytes offset_alignment() const noexcept { return offset_alignment_; }
  /// Addresses of transfers are multiples of this; 1 without O_DIRECT.
  Bytes memory_alignment() const noexcept { return memory_alignment_; }
  /// For messages: "directory/#inode".
  const std::string& path() const noexcept { return path_; }

 private:
  void open(const std::filesystem::path& directory, Direct direct);
  void ask_alignment();
  void preallocate(const std::filesystem::path& directory, Preallocate how);
  void write_zeros(const std::filesystem::path& directory);
  [[noreturn]] void refuse(const std::filesystem::path& directory, int error_number);

  OwnerProcess owner_;
  int fd_ = -1;
  Bytes size_;
  bool direct_ = false;
  Bytes offset_alignment_ = 1;
  Bytes memory_alignment_ = 1;
  std::string path_;
};

}  // namespace pagoda::io
