"""Templates of families whose own may not be copied, or come with no package: what they write for a
call, for reasoning and for a turn, in own words. `families.py` has more of them."""

from __future__ import annotations

from tests.cluster.api.text import families

# Llama 3.1: a call is one JSON object with "parameters"; tools are described to the user.
LLAMA = r"""{{- bos_token }}
{%- set ns = namespace(tools=tools) %}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- if message.role == 'user' and ns.tools %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and' }}
{{- ' its value}.\n\n' + (ns.tools | tojson(indent=4)) + '\n\n' }}
{%- set ns.tools = none %}
{%- endif %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

# Mistral's later form: the name, then the arguments; reasoning in tags of its own.
MAGISTRAL = r"""{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' %}
{%- if tools and loop.first %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}
{%- if message.reasoning_content %}
{{- '[THINK]' + message.reasoning_content + '[/THINK]' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}
{{- '</s>' }}
{%- endif %}
{%- endfor %}"""

# Kimi K2: each call has an id that counts, `functions.NAME:0`.
KIMI = families.KIMI.replace("call.id", "'functions.' ~ call.function.name ~ ':' ~ loop.index0")

# DeepSeek V3 with tools: its own template does not show any, servers bring one that does.
DEEPSEEK = r"""{{- bos_token }}
{%- if tools %}{{- '## Tools\n' }}
{%- for tool in tools %}{{- (tool.function | tojson) + '\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{{- '<｜Assistant｜>' + message.content }}
{%- if message.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{{- '\n' if not loop.first else '' }}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments | tojson }}{{- '\n```<｜tool▁call▁end｜>' }}
{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- else %}{{- message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"""

# Mistral Nemo: calls are one list of JSON.
MISTRAL = r"""{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'user' %}
{%- if tools and loop.first %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + ({'content': message.content, 'call_id': message.tool_call_id} | tojson) }}
{{- '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{{- call.function | tojson }}{{- ', ' if not loop.last else '' }}
{%- endfor %}{{- ']</s>' }}
{%- else %}{{- message.content + '</s>' }}{%- endif %}
{%- endfor %}"""
