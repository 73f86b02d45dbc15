# SPDX-License-Identifier: Apache-2.0
pagoda_test(property_io LABELS property
  SOURCES
    io_contents.cpp
    io_faults.cpp
    io_fork.cpp
    swap_full_disk.cpp
    swap_private.cpp
  LIBRARIES pagoda_io)
