# bash completion for impress. Commands, options and values are the program's own, so they are asked for, not listed here.
_impress()
{
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} program=${COMP_WORDS[0]}
    local -a command=("${COMP_WORDS[1]}")
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "$("$program" --help | sed -n 's/^  \([a-z]\+\)  .*/\1/p') --help --version" -- "$cur")
        return
    fi
    if [[ ${command[0]} == bench ]]; then
        if ((COMP_CWORD == 2)); then
            mapfile -t COMPREPLY < <(compgen -W "$("$program" bench --help | sed -n 's/^  \([a-z-]\+\)  .*/\1/p')" -- "$cur")
            return
        fi
        command+=("${COMP_WORDS[2]}")
    fi
    case $prev in
        --store | --tasks | --prefixes) compopt -o dirnames; return ;;
        -m | --model | -f | --file | --config | --key-file) compopt -o default; return ;;
        -s | --system | --systems)
            mapfile -t COMPREPLY < <(compgen -W "$("$program" systems --values system)" -- "$cur")
            return ;;
        --identify | --order | --rest | --cache | --prefetch | --rank)
            mapfile -t COMPREPLY < <(compgen -W "$("$program" systems --values "${prev#--}")" -- "$cur")
            return ;;
        --values) mapfile -t COMPREPLY < <(compgen -W "system identify order rest cache prefetch rank" -- "$cur"); return ;;
        --scoring) mapfile -t COMPREPLY < <(compgen -W "auto sum norm" -- "$cur"); return ;;
        --reference) mapfile -t COMPREPLY < <(compgen -W "as recomp" -- "$cur"); return ;;
        --state) mapfile -t COMPREPLY < <(compgen -W "cold warm both" -- "$cur"); return ;;
        --io) mapfile -t COMPREPLY < <(compgen -W "auto uring threads" -- "$cur"); return ;;
        --cache-type) mapfile -t COMPREPLY < <(compgen -W "f16 q8_0" -- "$cur"); return ;;
    esac
    if [[ $cur == -* ]]; then
        local options
        options=$("$program" "${command[@]}" --help 2>/dev/null | grep -oE '(^| )--[a-z][a-z0-9-]*' | sort -u)
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$cur")
    else
        compopt -o default
    fi
}
complete -F _impress impress
