# Choices of a build, and the flags that every target shares.
option(TOKENYARD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(TOKENYARD_PROGRAM "Build the tokenyard program" ${PROJECT_IS_TOP_LEVEL})
option(TOKENYARD_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(TOKENYARD_BENCH "Build the peers that the bench compares with, where they are installed" OFF)
option(TOKENYARD_INSTALL "Make install rules" ${PROJECT_IS_TOP_LEVEL})
option(TOKENYARD_CUDA "Build what needs nvcc" OFF)
option(TOKENYARD_LIBFUZZER "Link the fuzz targets to libFuzzer instead of to tests/fuzz/replay.cc; needs clang" OFF)
set(TOKENYARD_SANITIZE "" CACHE STRING "Sanitizers to build with: address,undefined or thread")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  # `tokenyard_verify_interface_header_sets` compiles every public header by itself.
  set(CMAKE_VERIFY_INTERFACE_HEADER_SETS ON)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Type of build" FORCE)
  endif()
  find_program(TOKENYARD_CCACHE ccache)
  mark_as_advanced(TOKENYARD_CCACHE)
  if(TOKENYARD_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${TOKENYARD_CCACHE})
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${TOKENYARD_CCACHE})
  endif()
endif()

add_library(tokenyard_flags INTERFACE)
# No contraction: only where the contract says so is a product fused with its addition (docs/protocol.md, "Sums").
target_compile_options(tokenyard_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off;-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Wno-sign-conversion>)
if(TOKENYARD_SANITIZE)
  target_compile_options(tokenyard_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${TOKENYARD_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>)
  target_link_options(tokenyard_flags INTERFACE -fsanitize=${TOKENYARD_SANITIZE})
endif()
if(TOKENYARD_LIBFUZZER)
  # All code tells where it goes, so that the fuzzer sees which inputs are new.
  target_compile_options(tokenyard_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
endif()
