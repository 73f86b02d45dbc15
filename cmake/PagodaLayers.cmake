# SPDX-License-Identifier: Apache-2.0
# pagoda_layer(NAME SOURCES … [DEPS …] [LIBRARIES …])
#
# The static target `pagoda_<NAME>` for the folder src/pagoda/<NAME>. DEPS are layers that its
# headers may include (the order is the design's; tests/checks/layers.py holds the includes to it),
# LIBRARIES are third-party targets.
function(pagoda_layer NAME)
  cmake_parse_arguments(LAYER "" "" "SOURCES;DEPS;LIBRARIES" ${ARGN})
  add_library(pagoda_${NAME} STATIC ${LAYER_SOURCES})
  target_link_libraries(pagoda_${NAME} PUBLIC pagoda_flags ${LAYER_LIBRARIES})
  foreach(dep IN LISTS LAYER_DEPS)
    target_link_libraries(pagoda_${NAME} PUBLIC pagoda_${dep})
  endforeach()
endfunction()

# pagoda_torch_layer(NAME …): the same for a folder that includes torch. Torch's headers are slow to
# compile, so these are built with -O2 and line tables only; the hot loops live below. Under sanitizers
# they are not optimised, in two units, and without the checks that are made at every use of a pointer,
# torch's inline ones included: the address sanitizer sees a null or freed object as well.
set(PAGODA_TORCH_OPTIONS -O2 -g1)
if(PAGODA_SANITIZE)
  set(PAGODA_TORCH_OPTIONS -O0)
endif()
if(PAGODA_SANITIZE MATCHES undefined)
  list(APPEND PAGODA_TORCH_OPTIONS -fno-sanitize=null,alignment,vptr)
endif()
function(pagoda_torch_layer NAME)
  pagoda_layer(${NAME} ${ARGN})
  target_link_libraries(pagoda_${NAME} PUBLIC torch_headers)
  target_compile_options(pagoda_${NAME} PRIVATE ${PAGODA_TORCH_OPTIONS})
  if(PAGODA_SANITIZE)
    set_target_properties(pagoda_${NAME} PROPERTIES UNITY_BUILD_BATCH_SIZE 15)
  endif()
endfunction()
