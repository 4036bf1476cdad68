"""Chat templates of the common formats, written from the formats."""

CHATML = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{ '<|im_start|>system\\nYou are a limpet.<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

LLAMA2 = """\
{%- if messages[0]['role'] == 'system' -%}
{%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}
{%- set messages = messages[1:] -%}
{%- else -%}
{%- set system = '' -%}
{%- endif -%}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate user/assistant') }}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
{%- else -%}
{{ ' ' + message['content'].strip() + ' ' + eos_token }}
{%- endif -%}
{%- endfor -%}
"""

LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""

QWEN3_LIKE = """\
{%- set ns = namespace(last=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'assistant' and loop.index0 < ns.last and '</think>' in content -%}
{%- set content = content.split('</think>')[-1].strip() -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

DEEPSEEK_V2 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- 'User: ' + message['content'] + '\\n\\n' -}}
{%- elif message['role'] == 'assistant' -%}
{{- 'Assistant: ' + message['content'] + eos_token -}}
{%- else -%}
{{- message['content'] + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""

FEATURES = """\
{%- generation -%}{{ messages | tojson(indent=1) }}{%- endgeneration -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {% if loop.index > 3 %}
        {%- break -%}
    {% endif %}
{{ message.content }}
{%- endfor -%}
{{ eos_token if tools is none else 'tools' }}
"""

TEMPLATES = {
    "chatml": CHATML,
    "llama 2": LLAMA2,
    "llama 3": LLAMA3,
    "qwen 3": QWEN3_LIKE,
    "deepseek v2": DEEPSEEK_V2,
    "features": FEATURES,
}
