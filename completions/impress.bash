# bash completion for impress. The options are those of `impress COMMAND --help`, so they are asked for, not listed here.
_impress()
{
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} program=${COMP_WORDS[0]} command=${COMP_WORDS[1]}
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "$("$program" --help | sed -n 's/^  \([a-z]\+\)  .*/\1/p') --help --version" -- "$cur")
        return
    fi
    case $prev in
        --store | --tasks) compopt -o dirnames; return ;;
        -m | --model | -f | --file | --config) compopt -o default; return ;;
        -s | --system | --systems) mapfile -t COMPREPLY < <(compgen -W "recomp as as-h2o-lru as-h2o-lfu" -- "$cur"); return ;;
        --scoring) mapfile -t COMPREPLY < <(compgen -W "auto sum norm" -- "$cur"); return ;;
        --reference) mapfile -t COMPREPLY < <(compgen -W "as recomp" -- "$cur"); return ;;
        --rest) mapfile -t COMPREPLY < <(compgen -W "f16 q8" -- "$cur"); return ;;
        --io) mapfile -t COMPREPLY < <(compgen -W "auto uring threads" -- "$cur"); return ;;
        --cache-type) mapfile -t COMPREPLY < <(compgen -W "f16 q8_0" -- "$cur"); return ;;
    esac
    if [[ $cur == -* ]]; then
        local options
        options=$("$program" "$command" --help 2>/dev/null | grep -oE '(^| )--[a-z][a-z0-9-]*' | sort -u)
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$cur")
    else
        compopt -o default
    fi
}
complete -F _impress impress
