# Writes OUTPUT (a header) with the version, git commit, dirty flag and compiler; touches it only when it changes.
execute_process(COMMAND git -C ${SOURCE} rev-parse --short=8 HEAD OUTPUT_VARIABLE sha
                OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
set(state "no git")
if(failed)
  set(sha "unknown")
else()
  execute_process(COMMAND git -C ${SOURCE} status --porcelain --untracked-files=no OUTPUT_VARIABLE changes ERROR_QUIET)
  # A new file is part of a build only in these folders; sites, studies and results of a user lie anywhere.
  execute_process(COMMAND git -C ${SOURCE} ls-files --others --exclude-standard -- src apps cmake
                  OUTPUT_VARIABLE new_sources ERROR_QUIET)
  set(state "clean")
  if(changes OR new_sources)
    set(state "dirty")
  endif()
endif()
set(text "#pragma once
#define GYRE_VERSION \"${VERSION}\"
#define GYRE_GIT_SHA \"${sha}\"
#define GYRE_GIT_STATE \"${state}\"
#define GYRE_BUILD_TYPE \"${BUILD_TYPE}\"
#define GYRE_COMPILER \"${COMPILER}\"
#define GYRE_BUILD_FLAGS R\"flags(${FLAGS})flags\"
")
set(old "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT old STREQUAL text)
  file(WRITE ${OUTPUT} "${text}")
endif()
