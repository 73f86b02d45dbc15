// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/cuda/runtime.h"

#include <cstdlib>
#include <filesystem>
#include <vector>

#include <dlfcn.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/device/cuda/cuda_device.h"

namespace pagoda::device::cuda {
namespace {

constexpr int kMajor = CUDART_VERSION / 1000;  // what the headers promise; the soname has it

/// Where the library may be, in the order of trying. A bare name is the loader's own search.
std::vector<std::string> candidates(const std::string& soname) {
  std::vector<std::string> paths = {soname};
  std::vector<std::filesystem::path> torch_folders;
  const char* search = std::getenv("LD_LIBRARY_PATH");
  std::string_view rest = search == nullptr ? "" : search;
  while (!rest.empty()) {
    const std::size_t colon = rest.find(':');
    const std::string_view entry = rest.substr(0, colon);
    if (!entry.empty()) torch_folders.emplace_back(entry);
    rest = colon == std::string_view::npos ? "" : rest.substr(colon + 1);
  }
  // The torch wheel's layout: site-packages/torch/lib beside site-packages/nvidia/cu13/lib.
  for (const auto& folder : torch_folders) {
    const std::filesystem::path nvidia = folder / ".." / ".." / "nvidia";
    paths.push_back(nvidia / fmt::format("cu{}", kMajor) / "lib" / soname);
    paths.push_back(nvidia / "cuda_runtime" / "lib" / soname);
  }
  paths.push_back(std::filesystem::path(PAGODA_CUDA_LIBRARY_DIR) / soname);
  return paths;
}

struct Loaded {
  Runtime runtime;
  std::string why_not;  // empty: the runtime is there
};

/// All or nothing: a library that lacks one of the functions is not used.
bool fill(Runtime& runtime, void* library, std::string& missing) {
  const auto look_up = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(library, name));
    if (function == nullptr && missing.empty()) missing = name;
  };
#define PAGODA_CUDA_LOOK_UP(Name) look_up(runtime.Name, "cuda" #Name);
  PAGODA_CUDA_FUNCTIONS(PAGODA_CUDA_LOOK_UP)
#undef PAGODA_CUDA_LOOK_UP
  return missing.empty();
}

/// The driver's functions are had through the driver library, which the runtime has loaded.
void find_driver(Runtime& runtime) {
  void* driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (driver == nullptr) return;
  void* symbol = ::dlsym(driver, "cuDevicePrimaryCtxGetState");
  runtime.PrimaryContextState = reinterpret_cast<decltype(runtime.PrimaryContextState)>(symbol);
}

Loaded load() {
  Loaded loaded;
  const std::string soname = fmt::format("libcudart.so.{}", kMajor);
  std::string tried;
  // The copy that torch has already loaded comes first: two runtimes in one process would not
  // share their view of the current device. The handle is never closed.
  void* library = ::dlopen(soname.c_str(), RTLD_NOW | RTLD_NOLOAD);
  for (const std::string& path : candidates(soname)) {
    if (library != nullptr) break;
    library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) tried += fmt::format("\n  {}", ::dlerror());
  }
  if (library == nullptr) {
    loaded.why_not = fmt::format("{} was not found; tried{}", soname, tried);
    return loaded;
  }
  std::string missing;
  if (!fill(loaded.runtime, library, missing)) {
    loaded.why_not = fmt::format("{} has no {}", soname, missing);
    return loaded;
  }
  int devices = 0;
  const cudaError_t code = loaded.runtime.GetDeviceCount(&devices);
  if (code != cudaSuccess || devices == 0) {
    loaded.runtime.GetLastError();
    loaded.why_not =
        fmt::format("{} sees no GPU ({})", soname, loaded.runtime.GetErrorString(code));
    return loaded;
  }
  find_driver(loaded.runtime);
  return loaded;
}

const Loaded& loaded() {
  static const Loaded* once = new Loaded(load());  // never destroyed: streams may outlive main()
  return *once;
}

}  // namespace

const Runtime& runtime() {
  if (!loaded().why_not.empty()) {
    throw UserError(fmt::format("CUDA is not available: {}", loaded().why_not));
  }
  return loaded().runtime;
}

bool available(std::string* why) {
  if (why != nullptr) *why = loaded().why_not;
  return loaded().why_not.empty();
}

int device_count() {
  if (!available()) return 0;
  int devices = 0;
  check(runtime().GetDeviceCount(&devices), "cudaGetDeviceCount");
  return devices;
}

void check(cudaError_t code, std::string_view call, std::source_location where) {
  if (code == cudaSuccess) [[likely]]
    return;
  const Runtime& cuda = runtime();
  cuda.GetLastError();
  throw EngineError(
      fmt::format("{} failed: {}", call, cuda.GetErrorString(code)),
      {context("error", cuda.GetErrorName(code)), context("code", static_cast<int>(code))}, where);
}

void log_failure(cudaError_t code, std::string_view call) noexcept {
  if (code == cudaSuccess || code == cudaErrorCudartUnloading) return;
  runtime().GetLastError();
  log::error("device", "a CUDA call failed while cleaning up",
             {{"call", call}, {"cause", runtime().GetErrorString(code)}});
}

DeviceGuard::DeviceGuard(int index) {
  const Runtime& cuda = runtime();
  int current = -1;
  check(cuda.GetDevice(&current), "cudaGetDevice");
  if (current == index) return;
  check(cuda.SetDevice(index), "cudaSetDevice");
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ < 0) return;
  const Runtime& cuda = runtime();
  unsigned flags = 0;
  int active = 1;
  if (cuda.PrimaryContextState != nullptr) cuda.PrimaryContextState(previous_, &flags, &active);
  if (active == 0) return;
  if (cuda.SetDevice(previous_) != cudaSuccess) {
    cuda.GetLastError();
    log::error("device", "the thread's former CUDA device could not be restored",
               {{"device", previous_}});
  }
}

}  // namespace pagoda::device::cuda
