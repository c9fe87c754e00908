# The C++ front end of cuDNN: headers from a wheel on PyPI (MIT and Apache 2.0), downloaded once into the build folder.
# -DGYRE_CUDNN_FRONTEND=DIR names an existing copy; OFF builds without.
#
# Sets GYRE_CUDNN_FRONTEND_INCLUDE. It is empty if there is none (no network, no pip): the build then goes on without
# cuDNN, and GYRE_CUDNN_FRONTEND_WHY says why.
set(cudnn_frontend_version 1.32.0)
set(cudnn_frontend_wheel
    nvidia_cudnn_frontend-${cudnn_frontend_version}-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl)
set(cudnn_frontend_sha256 c6006556017a4d1c914c52a556c71b1267f2d6a0500f742e7b4edef539878df0)

set(GYRE_CUDNN_FRONTEND AUTO
    CACHE STRING "Folder with cudnn_frontend.h; AUTO: downloaded from PyPI into the build folder; OFF: no cuDNN")

# The headers do not depend on Python: any pip can download this wheel, built for another version of Python.
function(gyre_download_cudnn_frontend folder)
  find_program(GYRE_PYTHON NAMES python3)
  if(NOT GYRE_PYTHON)
    set(GYRE_CUDNN_FRONTEND_WHY "no python3 to download its front end with" PARENT_SCOPE)
    return()
  endif()
  file(WRITE ${folder}/requirements.txt
       "nvidia-cudnn-frontend==${cudnn_frontend_version} --hash=sha256:${cudnn_frontend_sha256}\n")
  message(STATUS "Downloading the cuDNN front end ${cudnn_frontend_version}")
  execute_process(
    COMMAND ${GYRE_PYTHON} -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes
            --only-binary=:all: --implementation cp --python-version 3.11 --abi cp311 --platform manylinux_2_28_x86_64
            --retries 1 --timeout 20 --dest ${folder} --requirement ${folder}/requirements.txt
    TIMEOUT 180
    RESULT_VARIABLE result
    OUTPUT_VARIABLE text
    ERROR_VARIABLE text)
  if(NOT result EQUAL 0 OR NOT EXISTS ${folder}/${cudnn_frontend_wheel})
    string(STRIP "${text}" text)
    string(REGEX REPLACE ".*\n" "" text "${text}") # the last line has the reason
    set(GYRE_CUDNN_FRONTEND_WHY "its front end cannot be downloaded: ${text}" PARENT_SCOPE)
    return()
  endif()
  file(ARCHIVE_EXTRACT INPUT ${folder}/${cudnn_frontend_wheel} DESTINATION ${folder} PATTERNS "include/*")
  file(REMOVE ${folder}/${cudnn_frontend_wheel})
endfunction()

set(GYRE_CUDNN_FRONTEND_INCLUDE "")
set(GYRE_CUDNN_FRONTEND_WHY "")
if(GYRE_CUDNN_FRONTEND STREQUAL "OFF")
  set(GYRE_CUDNN_FRONTEND_WHY "GYRE_CUDNN_FRONTEND is OFF")
elseif(GYRE_CUDNN_FRONTEND STREQUAL "AUTO")
  set(folder ${CMAKE_BINARY_DIR}/cudnn-frontend-${cudnn_frontend_version})
  if(NOT EXISTS ${folder}/include/cudnn_frontend.h)
    gyre_download_cudnn_frontend(${folder})
  endif()
  if(EXISTS ${folder}/include/cudnn_frontend.h)
    set(GYRE_CUDNN_FRONTEND_INCLUDE ${folder}/include)
  endif()
elseif(EXISTS ${GYRE_CUDNN_FRONTEND}/cudnn_frontend.h)
  set(GYRE_CUDNN_FRONTEND_INCLUDE ${GYRE_CUDNN_FRONTEND})
else()
  message(FATAL_ERROR "there is no cudnn_frontend.h in GYRE_CUDNN_FRONTEND=${GYRE_CUDNN_FRONTEND}")
endif()
