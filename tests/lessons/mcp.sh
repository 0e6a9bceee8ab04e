# One MCP request with curl, so that a lesson can look at the wire.   source tests/lessons/mcp.sh   (sh and dash: a dot)
#
#   mcp METHOD BODY [curl arguments…]       for example:
#   mcp tools/call '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"get_weather",
#       "arguments":{"location":"Paris"},'"$META"'}}' -H 'Mcp-Name: get_weather'
#
# Ctrl-C closes the response stream, and that is the cancellation. -v among the curl arguments shows every header.
# $MCP: the MCP endpoint, by default http://127.0.0.1:3000/mcp.   $MCP_USER: who asks, by default alice.

# The member of params that every request must have: its two fields say version and capabilities, each time anew,
# because there is no handshake to remember them.
META='"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{}}'

mcp() {
  if [ $# -lt 2 ]; then echo 'usage: mcp METHOD BODY [curl arguments…]' >&2; return 2; fi
  local method="$1" body="$2"
  shift 2
  # Accept names both types, because the server chooses between one JSON object and a stream.
  # MCP-Protocol-Version and Mcp-Method are copies of what the body says; the server refuses copies that differ.
  # -N prints what arrives as it arrives; --data-raw sends the body as it is, even one that begins with @.
  # --noproxy: what goes to this machine must not pass through $http_proxy.
  curl -sSN "${MCP:-http://127.0.0.1:3000/mcp}" \
    --noproxy "localhost,127.0.0.1,::1,${no_proxy:-${NO_PROXY:-}}" \
    -H 'Content-Type: application/json' \
    -H 'Accept: application/json, text/event-stream' \
    -H 'MCP-Protocol-Version: 2026-07-28' \
    -H "Mcp-Method: $method" \
    -H "Authorization: Bearer ${MCP_USER:-alice}" \
    --data-raw "$body" --write-out '\nHTTP %{http_code}\n' "$@"
}
