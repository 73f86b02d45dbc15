# SPDX-License-Identifier: Apache-2.0
# Language level and flags. Everything that is ours links `pagoda_flags`; third-party headers are
# included as system headers and are not held to our warnings.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET default)

# A program run from the build tree is `build/bin/…`, a library `build/lib/…`.
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)

find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
endif()

# One build type, optimised with symbols. The sanitizer presets trade speed for stack traces.
if(PAGODA_SANITIZE)
  set(CMAKE_CXX_FLAGS_RELEASE "-O1 -g1")
else()
  set(CMAKE_CXX_FLAGS_RELEASE "-O3 -g1")
endif()

add_library(pagoda_flags INTERFACE)
target_include_directories(pagoda_flags INTERFACE ${CMAKE_SOURCE_DIR}/src
  ${CMAKE_BINARY_DIR}/generated)
target_compile_options(pagoda_flags INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Werror)
# Our own sources print as "src/pagoda/…" in errors, wherever the tree was built.
target_compile_options(pagoda_flags INTERFACE -fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=)
# NDEBUG in every build type: torch's RecordFunction has a member that exists only without it, so a
# build without NDEBUG disagrees with the shipped library about its layout. Our checks ignore it.
target_compile_definitions(pagoda_flags INTERFACE NDEBUG)
# Bits are a promise: the compiler may not fuse a multiply and an add (docs/notes/numerics.md).
target_compile_options(pagoda_flags INTERFACE -ffp-contract=off)
# The order of locks (docs/notes/threads.md) is checked where speed does not count.
if(PAGODA_SANITIZE)
  target_compile_definitions(pagoda_flags INTERFACE PAGODA_CHECK_LOCKS)
endif()
# In CMAKE_CXX_FLAGS, not in pagoda_flags: those come first on the command line, so that a target or
# a file can still switch a check off.
if(PAGODA_SANITIZE)
  string(APPEND CMAKE_CXX_FLAGS
    " -fsanitize=${PAGODA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all")
endif()
