# Finding llama.cpp: IMPRESS_LLAMA_PREFIX if set, else what cmake finds (CMAKE_PREFIX_PATH, the system), else the copy
# that scripts/get-llama.sh built in the user's cache. Its targets are `llama` and `ggml::ggml`.

macro(impress_find_llama)
  if(IMPRESS_LLAMA_PREFIX)
    find_package(llama CONFIG QUIET PATHS ${IMPRESS_LLAMA_PREFIX} NO_DEFAULT_PATH)
    if(NOT llama_FOUND)
      message(FATAL_ERROR "no llama.cpp in IMPRESS_LLAMA_PREFIX=${IMPRESS_LLAMA_PREFIX}")
    endif()
  else()
    find_package(llama CONFIG QUIET)
    if(NOT llama_FOUND)
      execute_process(COMMAND ${PROJECT_SOURCE_DIR}/scripts/get-llama.sh --find
        OUTPUT_VARIABLE impress_llama_found OUTPUT_STRIP_TRAILING_WHITESPACE)
      if(impress_llama_found)
        find_package(llama CONFIG QUIET PATHS ${impress_llama_found} NO_DEFAULT_PATH)
      endif()
    endif()
    if(NOT llama_FOUND)
      message(FATAL_ERROR "llama.cpp not found: run `make llama` (gets and builds it), or set IMPRESS_LLAMA_PREFIX, "
        "or configure with -DIMPRESS_LLAMA=OFF for the library alone")
    endif()
  endif()
  message(STATUS "llama.cpp ${llama_VERSION} in ${LLAMA_LIB_DIR}")
endmacro()

# A copy in the user's cache may not be readable by others, so `make install` takes its libraries along.
function(impress_install_llama)
  cmake_path(GET LLAMA_LIB_DIR PARENT_PATH prefix)
  if(EXISTS ${prefix}/impress-llama.txt)
    file(GLOB libs ${prefix}/lib/lib*.so*)
    install(FILES ${libs} DESTINATION ${CMAKE_INSTALL_LIBDIR}/impress)
  endif()
endfunction()

# Where an installed file finds the libraries: beside it, those taken along, and where llama.cpp was found. Transitive
# libraries of llama.cpp are looked up on our path only with the older DT_RPATH.
function(impress_llama_rpath target folder)
  set(here ${CMAKE_INSTALL_PREFIX}/${folder})
  file(RELATIVE_PATH lib ${here} ${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR})
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN/${lib};$ORIGIN/${lib}/impress;${LLAMA_LIB_DIR}")
  target_link_options(${target} PRIVATE -Wl,--disable-new-dtags)
endfunction()
