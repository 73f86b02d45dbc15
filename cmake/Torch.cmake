# SPDX-License-Identifier: Apache-2.0
# Torch, from the virtual environment that scripts/bootstrap.sh made (or any other: set
# PAGODA_TORCH_DIR to the folder of an installed `torch` package). A wheel is built against the torch
# of the Python that builds it.
#
#   torch_headers   include paths, ABI and link line of torch's own libraries
#   cuda_headers    the CUDA runtime's headers, when torch's dependencies brought them
set(PAGODA_TORCH_DIR "" CACHE PATH "Folder of the installed torch package")
if(SKBUILD AND NOT PAGODA_TORCH_DIR)
  find_package(Python COMPONENTS Interpreter REQUIRED)
  # Not by importing it: an isolated build does not see what is installed.
  execute_process(COMMAND ${Python_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('platlib'))"
    OUTPUT_VARIABLE platlib OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(EXISTS ${platlib}/torch)
    set_property(CACHE PAGODA_TORCH_DIR PROPERTY VALUE ${platlib}/torch)
  endif()
endif()
if(NOT PAGODA_TORCH_DIR)
  file(GLOB candidates ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
  if(candidates)
    list(GET candidates 0 first)
    set_property(CACHE PAGODA_TORCH_DIR PROPERTY VALUE ${first})
  endif()
endif()

# CUDA headers come with the wheel's own dependencies, as nvidia/cu13/include. They count only if
# they compile: the wheel leaves out a few that they include (requirements.txt has them).
# Not needed where torch is not: the sanitizers cannot follow the CUDA driver.
include(CheckIncludeFileCXX)
file(GLOB cuda_candidates ${PAGODA_TORCH_DIR}/../nvidia/cu1*/include/cuda_runtime_api.h
  ${PAGODA_TORCH_DIR}/../nvidia/cuda_runtime/include/cuda_runtime_api.h)
add_library(cuda_headers INTERFACE)
if(cuda_candidates AND PAGODA_TORCH)
  list(GET cuda_candidates 0 cuda_header)
  get_filename_component(cuda_include ${cuda_header} REALPATH)
  get_filename_component(cuda_include ${cuda_include} DIRECTORY)
  set(CMAKE_REQUIRED_INCLUDES ${cuda_include})
  check_include_file_cxx(cuda_runtime_api.h PAGODA_CUDA_HEADERS)
  unset(CMAKE_REQUIRED_INCLUDES)
  target_include_directories(cuda_headers SYSTEM INTERFACE ${cuda_include})
endif()
if(NOT PAGODA_CUDA_HEADERS AND PAGODA_TORCH)
  message(STATUS "No CUDA headers beside torch: the CUDA backend is a stub that says so")
endif()

if(PAGODA_TORCH)
  if(NOT EXISTS ${PAGODA_TORCH_DIR}/lib/libtorch_cpu.so)
    message(FATAL_ERROR "torch was not found (PAGODA_TORCH_DIR='${PAGODA_TORCH_DIR}'). "
      "Run scripts/bootstrap.sh, or configure with -DPAGODA_TORCH=OFF.")
  endif()
  add_library(torch_headers INTERFACE)
  # Searched last: torch brings a fmt of its own, and ours is the distribution's.
  target_compile_options(torch_headers INTERFACE
    "SHELL:-idirafter ${PAGODA_TORCH_DIR}/include"
    "SHELL:-idirafter ${PAGODA_TORCH_DIR}/include/torch/csrc/api/include")
  target_link_directories(torch_headers INTERFACE ${PAGODA_TORCH_DIR}/lib)
  target_link_libraries(torch_headers INTERFACE torch_cpu c10)
  # The wheel's folder is the run path; LD_LIBRARY_PATH overrides it on another machine.
  target_link_options(torch_headers INTERFACE -Wl,-rpath,${PAGODA_TORCH_DIR}/lib)
endif()
