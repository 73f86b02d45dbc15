// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/swap_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "pagoda/base/aligned_buffer.h"
#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/io/io_error.h"

namespace pagoda::io {
namespace {

constexpr mode_t kPrivate = S_IRUSR | S_IWUSR;

/// A file that never had a name, or -1. O_EXCL: nor can it be given one.
int open_unnamed(const std::filesystem::path& directory, int flags) {
  return ::open(directory.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC | flags, kPrivate);
}

/// For file systems without O_TMPFILE: a name nobody can guess, taken away at once.
int open_unlinked(const std::filesystem::path& directory, int flags) {
  std::random_device random;
  for (int attempt = 0; attempt < 100; ++attempt) {
    const auto path = directory / fmt::format(".pagoda-swap-{:08x}{:08x}", random(), random());
    const int fd = ::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | flags, kPrivate);
    if (fd >= 0) {
      ::unlink(path.c_str());
      return fd;
    }
    if (errno == EINVAL && (flags & O_DIRECT) != 0) {
      // Some kernels make the file before they find that it cannot be direct.
      ::unlink(path.c_str());
      errno = EINVAL;
      return -1;
    }
    if (errno != EEXIST) return -1;
  }
  return -1;
}

int open_private(const std::filesystem::path& directory, int flags) {
  const int fd = open_unnamed(directory, flags);
  if (fd >= 0) return fd;
  // What file systems and old kernels answer to O_TMPFILE; EINVAL may be O_DIRECT's, too.
  const bool unsupported = errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL ||
                           errno == ENOSYS || errno == ENOENT;
  return unsupported ? open_unlinked(directory, flags) : -1;
}

}  // namespace

std::optional<Bytes> file_size_limit() {
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::nullopt;
  }
  return limit.rlim_cur;
}

SwapFile::SwapFile(const std::filesystem::path& directory, Bytes size, Options options)
    : size_(size) {
  try {
    open(directory, options.direct);
    if (direct_) ask_alignment();
    preallocate(directory, options.preallocate);
  } catch (...) {
    if (fd_ >= 0) ::close(fd_);
    throw;
  }
}

SwapFile::SwapFile(SwapFile&& other) noexcept
    : owner_(other.owner_),
      fd_(std::exchange(other.fd_, -1)),
      size_(other.size_),
      direct_(other.direct_),
      offset_alignment_(other.offset_alignment_),
      memory_alignment_(other.memory_alignment_),
      path_(std::move(other.path_)) {}

SwapFile::~SwapFile() {
  if (fd_ < 0) return;
  // An io_uring may keep the file open for a while after its end: its space is free at once.
  if (owner_.here()) (void)!::ftruncate(fd_, 0);
  ::close(fd_);
}

void SwapFile::open(const std::filesystem::path& directory, Direct direct) {
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0) {
    throw UserError(
        errno == ENOENT
            ? fmt::format("nvme directory '{}' does not exist", directory.string())
            : fmt::format("nvme directory '{}': {}", directory.string(), errno_text(errno)));
  }
  if (!S_ISDIR(info.st_mode)) {
    throw UserError(fmt::format("nvme directory '{}' is not a directory", directory.string()));
  }
  if (direct != Direct::Off) {
    fd_ = open_private(directory, O_DIRECT);
    direct_ = fd_ >= 0;
    if (fd_ < 0 && errno == EINVAL) {
      if (direct == Direct::On) {
        throw UserError(
            fmt::format("the file system of nvme directory '{}' does not allow direct I/O: set "
                        "direct to auto or off, or name another directory",
                        directory.string()));
      }
      log::warn("io", "no direct I/O here, swapping through the page cache",
                {{"directory", directory.string()}});
      fd_ = open_private(directory, 0);
    }
  } else {
    fd_ = open_private(directory, 0);
  }
  if (fd_ < 0) {
    throw UserError(fmt::format("nvme directory '{}' cannot be used, no file can be made in it: {}",
                                directory.string(), errno_text(errno)));
  }
  ::fchmod(fd_, kPrivate);  // whatever the umask left
  ::fstat(fd_, &info);
  path_ = (directory / fmt::format("#{}", info.st_ino)).string();
}

void SwapFile::ask_alignment() {
  // Without an answer (before Linux 6.1) the page is right for every disk.
  offset_alignment_ = 4096;
  memory_alignment_ = 4096;
#ifdef STATX_DIOALIGN
  struct statx info {};
  if (::statx(fd_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
      (info.stx_mask & STATX_DIOALIGN) != 0 && info.stx_dio_offset_align != 0) {
    PAGODA_REQUIRE_LE(info.stx_dio_offset_align, 4096U, "a disk with blocks larger than a page: {}",
                      path_);
    memory_alignment_ = std::max<Bytes>(info.stx_dio_mem_align, 64);
  }
#endif
}

void SwapFile::preallocate(const std::filesystem::path& directory, Preallocate how) {
  if (size_ == 0) return;
  if (const auto limit = file_size_limit(); limit && size_ > *limit) refuse(directory, EFBIG);
  // Asked first, so that a hopeless request does not fill the disk before it fails.
  struct statvfs disk {};
  if (::fstatvfs(fd_, &disk) == 0 && disk.f_blocks > 0 &&
      static_cast<Bytes>(disk.f_bavail) * disk.f_frsize < size_) {
    refuse(directory, ENOSPC);
  }
  if (how == Preallocate::Reserve) {
    int result = 0;
    do {
      result = ::fallocate(fd_, 0, 0, static_cast<off_t>(size_));
    } while (result != 0 && errno == EINTR);
    if (result == 0) return;
    if (errno != EOPNOTSUPP && errno != ENOSYS) refuse(directory, errno);
    log::info("io", "no fallocate here, writing zeros", {{"directory", directory.string()}});
  }
  write_zeros(directory);
}

void SwapFile::write_zeros(const std::filesystem::path& directory) {
  AlignedBuffer zeros(4_MiB);
  std::memset(zeros.data(), 0, zeros.size());
  // A direct file may need a last write beyond its end; the size is cut back to what was asked.
  for (Bytes done = 0; done < size_;) {
    const Bytes length = std::min(align_up(size_ - done, 4096), zeros.size());
    const ssize_t written = ::pwrite(fd_, zeros.data(), length, static_cast<off_t>(done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) refuse(directory, written < 0 ? errno : ENOSPC);
    done += align_down(static_cast<Bytes>(written), 4096);
  }
  // The page cache may have promised space that the disk does not have.
  if (::fsync(fd_) != 0) refuse(directory, errno);
}

void SwapFile::refuse(const std::filesystem::path& directory, int error_number) {
  struct statvfs disk {};
  // What was claimed before it failed counts as free.
  [[maybe_unused]] const int cut = ::ftruncate(fd_, 0);
  const bool known = ::fstatvfs(fd_, &disk) == 0;
  const Bytes available = known ? static_cast<Bytes>(disk.f_bavail) * disk.f_frsize : 0;
  if (error_number == EFBIG) {
    const auto limit = file_size_limit();
    throw UserError(fmt::format(
        "a swap file of {} in nvme directory '{}' is larger than {}: {}lower nvme_budget, or name "
        "more directories",
        format_bytes(size_), directory.string(),
        limit ? fmt::format("RLIMIT_FSIZE (ulimit -f) allows, {}", format_bytes(*limit))
              : "its file system allows",
        limit ? "raise the limit, " : ""));
  }
  if (error_number == ENOSPC || error_number == EDQUOT) {
    throw UserError(
        fmt::format("a swap file of {} does not fit into nvme directory '{}', where {} are free: "
                    "lower nvme_budget, make room or name another directory ({})",
                    format_bytes(size_), directory.string(), format_bytes(available),
                    errno_text(error_number)));
  }
  throw IoError("cannot claim swap space", path_, 0, size_, error_number);
}

}  // namespace pagoda::io
