# Finding llama.cpp: IMPRESS_LLAMA_PREFIX if set, else where scripts/get-llama.sh says (CMAKE_PREFIX_PATH, the system, the
# copy that it built in the user's cache), else what cmake finds by itself. Its targets are `llama` and `ggml::ggml`.

macro(impress_find_llama)
  set(impress_llama_where ${IMPRESS_LLAMA_PREFIX})
  if(NOT impress_llama_where)
    list(JOIN CMAKE_PREFIX_PATH ":" impress_prefixes)
    execute_process(COMMAND ${CMAKE_COMMAND} -E env "CMAKE_PREFIX_PATH=${impress_prefixes}:$ENV{CMAKE_PREFIX_PATH}"
      ${PROJECT_SOURCE_DIR}/scripts/get-llama.sh --find
      OUTPUT_VARIABLE impress_llama_where OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  # What was found last time is remembered, and must be forgotten when it is to be another one: the copy in the cache is
  # another one on another CPU.
  if(NOT "${impress_llama_where}" STREQUAL "${IMPRESS_LLAMA_USED}")
    get_cmake_property(impress_remembered CACHE_VARIABLES)
    list(FILTER impress_remembered INCLUDE REGEX "^(llama|ggml|GGML)_.*(DIR|LIBRARY)$")
    foreach(variable ${impress_remembered})
      unset(${variable} CACHE)
    endforeach()
  endif()
  set(IMPRESS_LLAMA_USED "${impress_llama_where}" CACHE INTERNAL "")
  if(impress_llama_where)
    find_package(llama CONFIG QUIET PATHS ${impress_llama_where} NO_DEFAULT_PATH)
  else()
    find_package(llama CONFIG QUIET)
  endif()
  if(NOT llama_FOUND AND IMPRESS_LLAMA_PREFIX)
    message(FATAL_ERROR "no llama.cpp in IMPRESS_LLAMA_PREFIX=${IMPRESS_LLAMA_PREFIX}")
  elseif(NOT llama_FOUND)
    message(FATAL_ERROR "llama.cpp not found: run `make llama` (gets and builds it), or set IMPRESS_LLAMA_PREFIX, "
      "or configure with -DIMPRESS_LLAMA=OFF for the library alone")
  endif()
  message(STATUS "llama.cpp ${llama_VERSION} in ${LLAMA_LIB_DIR}")
  impress_find_llama_common()
endmacro()

# Chat templates, tool calls and schemas: the part of llama.cpp's common library that scripts/get-llama.sh installs beside
# it. Gives impress_llama_common, and C++ for the one file that uses it. Without, the server does what the C API can.
option(IMPRESS_LLAMA_COMMON "Use llama.cpp's common library, if it is there: Jinja templates, tool calls, JSON schemas" ON)
macro(impress_find_llama_common)
  cmake_path(GET LLAMA_LIB_DIR PARENT_PATH impress_llama_prefix)
  set(impress_common_archive ${LLAMA_LIB_DIR}/libllama-common.a)
  set(impress_common_headers ${impress_llama_prefix}/include)
  if(IMPRESS_LLAMA_COMMON AND EXISTS ${impress_common_archive} AND EXISTS ${impress_common_headers}/llama-common/chat.h)
    enable_language(CXX)
    add_library(impress_llama_common STATIC IMPORTED GLOBAL)
    set_target_properties(impress_llama_common PROPERTIES
      IMPORTED_LOCATION ${impress_common_archive} IMPORTED_LINK_INTERFACE_LANGUAGES CXX
      INTERFACE_INCLUDE_DIRECTORIES ${impress_common_headers})
    # The archive has functions that refer to parts of the library which aren't in there. They are dropped.
    target_link_options(impress_llama_common INTERFACE -Wl,--gc-sections)
    target_link_libraries(impress_llama_common INTERFACE llama)
  else()
    message(STATUS "llama.cpp's common library not used: no Jinja templates, tool calls and JSON schemas")
  endif()
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
