# SPDX-License-Identifier: Apache-2.0
# Third-party libraries, from the distribution. A binary must run on a machine that has torch but
# not these packages, so each is either a static archive or headers only. Highway has no static
# archive in Debian: we use its headers and dispatch ourselves (kernels/dispatch.h).
find_package(Threads REQUIRED)

function(pagoda_header_library TARGET HEADER)
  find_path(${TARGET}_INCLUDE ${HEADER} REQUIRED)
  add_library(${TARGET} INTERFACE)
  if(NOT ${TARGET}_INCLUDE STREQUAL "/usr/include")
    target_include_directories(${TARGET} SYSTEM INTERFACE ${${TARGET}_INCLUDE})
  endif()
endfunction()

find_path(FMT_INCLUDE fmt/format-inl.h REQUIRED)
add_library(third_party_fmt STATIC ${CMAKE_SOURCE_DIR}/third_party/fmt.cpp)
if(PAGODA_SANITIZE)  # not ours, and slow to compile with checks
  target_compile_options(third_party_fmt PRIVATE -fno-sanitize=all)
endif()

pagoda_header_library(third_party_spdlog spdlog/spdlog.h)
target_compile_definitions(third_party_spdlog INTERFACE SPDLOG_HEADER_ONLY SPDLOG_FMT_EXTERNAL)
target_link_libraries(third_party_spdlog INTERFACE third_party_fmt)

pagoda_header_library(third_party_highway hwy/highway.h)
pagoda_header_library(third_party_cli11 CLI/CLI.hpp)
pagoda_header_library(third_party_json nlohmann/json.hpp)
pagoda_header_library(third_party_xxhash xxhash.h)

pagoda_header_library(third_party_uring liburing.h)
find_library(URING_ARCHIVE liburing.a REQUIRED)
target_link_libraries(third_party_uring INTERFACE ${URING_ARCHIVE})

