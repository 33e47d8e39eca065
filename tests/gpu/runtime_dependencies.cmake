# Fails when PROGRAM needs a shared library that is not part of every Linux system with glibc.
file(GET_RUNTIME_DEPENDENCIES EXECUTABLES ${PROGRAM} RESOLVED_DEPENDENCIES_VAR found
     UNRESOLVED_DEPENDENCIES_VAR missing)
list(APPEND found ${missing})
list(FILTER found EXCLUDE REGEX "(^|/)(libc|libm|libpthread|libdl|librt|ld-linux-x86-64|ld-linux-aarch64)\\.so\\.[0-9]+$")
if(found)
  message(FATAL_ERROR "${PROGRAM} needs ${found}")
endif()
