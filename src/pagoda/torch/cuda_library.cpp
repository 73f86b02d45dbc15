// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/cuda_library.h"

#include <filesystem>
#include <mutex>
#include <string>

#include <ATen/Context.h>
#include <dlfcn.h>

#include "pagoda/base/error.h"
#include "pagoda/base/ranked_mutex.h"

namespace pagoda::torch {
namespace {

/// The folder of the torch that this process has loaded.
std::filesystem::path torch_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&at::globalContext), &info) == 0) return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

}  // namespace

void load_cuda() {
  static RankedMutex<LockRank::CudaLibrary> mutex;
  const std::lock_guard lock(mutex);
  // Not hasCUDA() first: torch remembers its answer for good.
  const std::string library = torch_folder() / "libtorch_cuda.so";
  PAGODA_REQUIRE(dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr,
                 "torch's CUDA operators cannot be loaded: {}", dlerror());
  PAGODA_REQUIRE(at::globalContext().hasCUDA(), "torch finds no GPU that it can use");
}

}  // namespace pagoda::torch
